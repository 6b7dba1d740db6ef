"""backend=onnxruntime: the embedded engine."""
