"""TensorRT's Python interface without its libraries."""
