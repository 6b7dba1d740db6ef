"""What a command reads of a model before any work, from a Hugging Face checkpoint or a GGUF."""
