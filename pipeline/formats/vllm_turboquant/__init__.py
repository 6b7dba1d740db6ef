"""The values of vLLM's turboquant types, and the keys of those with `nc`, in its rounding: of 4 bits and of 3."""
