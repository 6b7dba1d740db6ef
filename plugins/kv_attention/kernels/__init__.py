"""Triton kernels: one source for the interpreter, for torch on CUDA, and for TensorRT, compiled ahead of time."""
