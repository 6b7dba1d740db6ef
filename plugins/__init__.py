"""GPU plugins: attention over a quantized, paged KV cache. Imports nothing else of kvgate."""
