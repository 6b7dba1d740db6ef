"""As much of SGLang as the worker imports."""
