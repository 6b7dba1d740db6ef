"""Engines over a quantized KV cache: one folder a backend."""
