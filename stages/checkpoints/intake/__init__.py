"""Checks of a Hugging Face checkpoint or a GGUF before any work starts, and its shapes."""
