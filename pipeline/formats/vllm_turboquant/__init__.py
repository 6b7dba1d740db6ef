"""The values of vLLM's turboquant_k8v4 and turboquant_4bit_nc, and the keys of the latter, in its rounding."""
