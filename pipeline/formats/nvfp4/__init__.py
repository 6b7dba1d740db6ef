"""NVFP4: E2M1 codes, an E4M3 scale for each 16 channels, in units of a float32 scale of the layer."""
