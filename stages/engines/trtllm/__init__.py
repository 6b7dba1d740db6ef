"""backend=trtllm: TensorRT-LLM in an interpreter of its own; a TensorRT engine (1.2) or a served checkpoint (from 1.3)."""
