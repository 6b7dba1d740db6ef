"""Questions: generated, from documentation, the user's own; and how prompts are rendered."""
