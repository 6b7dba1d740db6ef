"""Checks that a GGUF's weights are finite. Only a block's floats can be NaN or infinite, so no tensor is dequantized."""

import numpy as np

from stages.checkpoints.finite import is_finite
from stages.checkpoints.gguf.header import Header, tensor_types

NUMBERS = {"F32": ("F32", 0, 4), "F16": ("F16", 0, 2), "BF16": ("BF16", 0, 2), "Q4_0": ("F16", 0, 2), "Q4_1": ("F16", 0, 4),
           "Q5_0": ("F16", 0, 2), "Q5_1": ("F16", 0, 4), "Q8_0": ("F16", 0, 2), "Q2_K": ("F16", 80, 84),
           "Q3_K": ("F16", 108, 110), "Q4_K": ("F16", 0, 4), "Q5_K": ("F16", 0, 4), "Q6_K": ("F16", 208, 210)}  # fmt: skip
"""Tensor type -> (type of a block's floats, first byte, end byte). The conversion checks other tensor types."""


def check_finite(header: Header) -> None:
    """Raise UserError with the tensor's name if a weight is NaN or infinite."""
    sizes = {kind: size for kind, _, size in tensor_types().values()}
    for name, tensor in header.tensors.items():
        if tensor.kind in NUMBERS:
            kind, first, end = NUMBERS[tensor.kind]
            stored = np.memmap(header.path, np.uint8, "r", tensor.offset, (tensor.nbytes,)).reshape(-1, sizes[tensor.kind])
            if not is_finite(stored[:, first:end], kind):
                raise header.error(f"tensor {name} holds a value that is not finite; convert the model again")
