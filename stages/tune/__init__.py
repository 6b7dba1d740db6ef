"""Searches for policies with different formats per layer and side: measures sensitivities, solves an integer program,
measures the proposals."""
