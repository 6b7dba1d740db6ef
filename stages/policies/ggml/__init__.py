"""llama.cpp's cache types: blocks of 32 channels with a scale per block, in ggml's rounding and byte layout."""
