"""Scripts that run in llama.cpp's interpreter. They import nothing from kvgate and so need none of its dependencies."""
