"""Quantization: calibration texts, quantized weights (by ModelOpt), measured extremes of the cache, and a policy's scales."""
