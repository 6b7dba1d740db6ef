"""Finds policies whose formats differ by layer and side: what each place costs, an integer program, and joint measurements."""
