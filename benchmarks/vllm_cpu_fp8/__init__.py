"""What vLLM's FP8 cache on a CPU computes: docs/backends.md#what-kvgate-found-in-vllm."""
