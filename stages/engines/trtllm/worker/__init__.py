"""Scripts that run in TensorRT-LLM's interpreter. They import nothing from kvgate and so need none of its dependencies."""
