"""backend=llamacpp: llama.cpp through llama-cpp-python, run in another Python interpreter."""
