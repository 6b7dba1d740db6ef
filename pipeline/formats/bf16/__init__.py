"""bfloat16: float32's range, 8 bits of precision."""
