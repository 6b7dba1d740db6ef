"""backend=torch: transformers over a reference cache, independent of ONNX and simple enough to check by reading."""
