"""Faults of real KV caches, planted in kvgate's engines and judged by the real gates."""
