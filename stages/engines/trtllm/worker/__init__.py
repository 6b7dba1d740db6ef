"""Scripts that run in TensorRT-LLM's interpreter. They import nothing of kvgate, so that they need none of its libraries."""
