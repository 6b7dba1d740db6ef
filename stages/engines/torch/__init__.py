"""backend=torch: `reference/` on a CPU, `cuda/` on a GPU."""
