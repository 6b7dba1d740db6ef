"""Self-test of backend=tensorrt on a machine with TensorRT and a GPU: `python -m stages.selftest`."""
