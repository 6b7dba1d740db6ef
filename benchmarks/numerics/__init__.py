"""Claims of the literature on quantized KV caches, measured on the tiny model: `python -m benchmarks.numerics`."""
