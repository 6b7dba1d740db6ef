"""FP8 with 4 bits of exponent and 3 of mantissa."""
