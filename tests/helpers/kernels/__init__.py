"""Caches and machine code for tests of the attention kernels."""
