"""backend=onnxruntime: the default engine."""
