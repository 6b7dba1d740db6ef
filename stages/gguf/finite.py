"""Whether a GGUF's weights are finite. Only a block's floats can be NaN or infinite, so that nothing is dequantized."""

import numpy as np
import numpy.typing as npt

from pipeline.gguf.header import TENSOR_TYPES, Header, Tensor

NUMBERS = {"F32": ("<f4", 0, 1), "F16": ("<f2", 0, 1), "BF16": ("<u2", 0, 1), "Q4_0": ("<f2", 0, 1), "Q4_1": ("<f2", 0, 2),
           "Q5_0": ("<f2", 0, 1), "Q5_1": ("<f2", 0, 2), "Q8_0": ("<f2", 0, 1), "Q2_K": ("<f2", 80, 2), "Q3_K": ("<f2", 108, 1),
           "Q4_K": ("<f2", 0, 2), "Q5_K": ("<f2", 0, 2), "Q6_K": ("<f2", 208, 1)}  # fmt: skip
"""For each tensor type: the type of a block's floats, the byte where the floats begin, the number of floats. The
conversion checks other tensor types."""
BLOCKS = 1 << 20
"""Blocks that are read at once."""
BYTES = {kind: size for kind, _, size in TENSOR_TYPES.values()}


def check_finite(header: Header) -> None:
    """Refuse a weight that is NaN or infinite. Raises UserError with the tensor's name."""
    for name, tensor in header.tensors.items():
        if tensor.kind in NUMBERS and not _is_finite(header, tensor):
            raise header.error(f"tensor {name} holds a value that is not finite; convert the model again")


def _is_finite(header: Header, tensor: Tensor) -> bool:
    kind, first, count = NUMBERS[tensor.kind]
    end = first + count * np.dtype(kind).itemsize
    stored = np.memmap(header.path, np.uint8, "r", tensor.offset, (tensor.nbytes,)).reshape(-1, BYTES[tensor.kind])
    for start in range(0, len(stored), BLOCKS):
        numbers: npt.NDArray[np.generic] = np.ascontiguousarray(stored[start : start + BLOCKS, first:end]).view(kind)
        if tensor.kind == "BF16":
            numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        if not np.isfinite(numbers).all():
            return False
    return True
