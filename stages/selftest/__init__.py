"""What only a machine with TensorRT and a GPU can show, checked there."""
