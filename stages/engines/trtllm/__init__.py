"""backend=trtllm: TensorRT-LLM in another Python interpreter; a TensorRT engine (1.2) or a served checkpoint (from 1.3)."""
