"""llama.cpp's blocks of 32 channels, each with a scale of its own: the types of its cache, in ggml's rounding and bytes."""
