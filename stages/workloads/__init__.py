"""Questions: generated, from documentation, the user's own, GSM8K; and how prompts are rendered."""
