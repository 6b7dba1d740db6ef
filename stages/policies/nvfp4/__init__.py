"""NVFP4: E2M1 codes with an E4M3 scale per 16 channels, in units of the layer's float32 scale."""
