"""Converts a GGUF file to a Hugging Face checkpoint."""
