"""kvgate's domain, one folder per concept: policies, checkpoints, workloads, engines, evaluation and verdict."""
