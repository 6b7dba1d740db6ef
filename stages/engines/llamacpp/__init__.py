"""backend=llamacpp: llama.cpp, by llama-cpp-python in an interpreter of its own."""
