"""Scripts that run in vLLM's interpreter. They import nothing of kvgate, so that they need none of its libraries."""
