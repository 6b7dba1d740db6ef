"""Quantization: calibration texts, ModelOpt's quantization of a checkpoint's weights, the extremes of its cache, and the
scales of a policy."""
