"""Triton kernels: one source for the interpreter, torch on CUDA, and TensorRT ahead of time."""
