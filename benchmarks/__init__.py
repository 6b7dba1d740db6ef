"""Benchmarks, each beside a peer: run as `python -m benchmarks.NAME` from the repository's root."""
