"""Benchmarks. Run them as `python -m benchmarks.NAME` from the repository's root."""
