"""The values of vLLM's turboquant_k8v4, with vLLM's rounding."""
