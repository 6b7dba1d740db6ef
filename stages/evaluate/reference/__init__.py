"""Comparison of an engine with its reference engine: `OracleEngine` under the same policy."""
