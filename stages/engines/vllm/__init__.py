"""backend=vllm: vLLM in an interpreter of its own."""
