"""Values of vLLM's turboquant_k8v4, in its rounding."""
