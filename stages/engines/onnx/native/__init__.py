"""Attention over the cache as a C kernel, compiled on the machine that runs it."""
