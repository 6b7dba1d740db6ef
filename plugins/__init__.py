"""GPU plugins: attention over the quantized cache. Imports nothing of ours; empty until the kernels come."""
