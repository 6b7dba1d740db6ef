"""backend=torch: transformers over a reference quantized cache, independent of ONNX and simple enough to check by reading."""
