"""backend=trtllm: TensorRT-LLM in another Python interpreter; a TensorRT engine (1.2) or a served checkpoint (1.2 or later)."""
