"""kvgate's ONNX engine beside other CPU engines with a quantized KV cache, on one model, each in a process of its own."""
