"""backend=tensorrt_rtx and backend=tensorrt: plans built from an ONNX bundle's graph, run on CUDA over the paged pool."""
