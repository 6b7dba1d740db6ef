"""backend=torch: its configuration, and the choice between `../reference/` on a CPU and `../cuda/` on a GPU."""
