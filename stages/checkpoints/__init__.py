"""Checks and descriptions of Hugging Face checkpoints, from their JSON and headers, without torch or transformers."""
