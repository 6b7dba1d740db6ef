"""GGUF files: the header, read strictly and without trust, and what it says of the model and its tokenizer."""
