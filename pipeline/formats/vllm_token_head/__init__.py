"""vLLM's int4_per_token_head, in its rotation and rounding."""
