"""float16, the type of the baseline's cache."""
