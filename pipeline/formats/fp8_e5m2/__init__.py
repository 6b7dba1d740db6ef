"""FP8 with 5 bits of exponent and 2 of mantissa."""
