"""backend=tensorrt_rtx and backend=tensorrt: plans of the ONNX bundle's graphs, run on CUDA over the same paged pool."""
