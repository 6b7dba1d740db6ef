"""Checkpoints and GGUF files that tests write."""
