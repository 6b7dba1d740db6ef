"""What a Hugging Face checkpoint is and holds: read from its JSON and headers, without torch or transformers."""
