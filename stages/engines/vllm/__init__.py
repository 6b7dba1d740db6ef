"""backend=vllm: vLLM, run in another Python interpreter."""
