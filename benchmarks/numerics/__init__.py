"""What the literature says of quantized KV caches, measured on the tiny model: `python -m benchmarks.numerics`."""
