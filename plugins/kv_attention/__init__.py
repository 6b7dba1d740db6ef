"""Decode attention over a paged, quantized KV cache: page layout, plain torch reference, Triton kernels, TensorRT plugin."""
