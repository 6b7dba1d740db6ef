"""GGUF files: strict reading of untrusted headers, and the model and tokenizer that a header describes."""
