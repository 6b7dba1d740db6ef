"""Decode attention as a kernel that is compiled on the machine that runs it."""
