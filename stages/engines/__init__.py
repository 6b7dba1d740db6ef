"""Engines over a quantized KV cache: one folder per backend."""
