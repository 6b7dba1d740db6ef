"""Attention over a paged, quantized KV cache: page layout, Triton kernels, their launches on torch, and TensorRT plugins."""
