"""Comparison of an engine with its reference engine: `TorchEngine` under the same policy."""
