"""vLLM's int4_per_token_head, int8_per_token_head and fp8_per_token_head, with vLLM's rotation and rounding."""
