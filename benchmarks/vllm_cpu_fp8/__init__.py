"""What vLLM's FP8 cache on a CPU computes: docs/findings/vllm-cpu-fp8.md."""
