"""As much of vLLM as the worker imports."""
