"""backend=torch: transformers over a reference quantized cache, written to be checked by eye and independent of ONNX."""
