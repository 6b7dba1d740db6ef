"""Quantization: calibration texts, and ModelOpt's quantization of a checkpoint for one weights format and one KV policy."""
