"""Scripts that run in vLLM's interpreter. They import nothing from kvgate and so need none of its dependencies."""
