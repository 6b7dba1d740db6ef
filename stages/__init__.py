"""The work behind the pipeline's stages: workloads, engines, quantization, evaluation, the tiny model."""
