"""Scripts that run in TensorRT-LLM's interpreter. They import nothing of ours, so that they need none of our libraries."""
