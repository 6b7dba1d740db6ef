"""Faults as real KV caches have them, planted in our engines and judged by the real gates."""
