"""backend=torch on a GPU: the engine over the attention kernels."""
