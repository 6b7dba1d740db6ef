"""Checks that weights are finite as float32. Non-negative floats are ordered like their bits, so comparing bits is enough."""

import numpy as np
import numpy.typing as npt

from stages.checkpoints.description import CheckpointInfo
from stages.checkpoints.files import refusal, safetensors_header
from stages.checkpoints.gguf.header import Header, tensor_types
from stages.core.redaction import printable
from stages.core.threads import in_threads

NOT_FINITE = {
    "F64": ("<u8", 0x47EFFFFFF0000000),  # float32 rounds this number to infinity
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E4M3": ("u1", 0x7F),
}
"""Weight type -> unsigned integer type of equal width, and the smallest bits that are not finite."""
GGUF_NUMBERS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), ("F16", 0, 2)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), ("F16", 0, 4)),
    **{"F32": ("F32", 0, 4), "F16": ("F16", 0, 2), "BF16": ("BF16", 0, 2)},
    **{"Q2_K": ("F16", 80, 84), "Q3_K": ("F16", 108, 110), "Q6_K": ("F16", 208, 210)},
}
"""Tensor type -> (type of a block's floats, first byte, end byte). The conversion checks other tensor types."""
BYTES = 1 << 20
"""Bytes per step; they fit into the processor's cache."""


def is_finite(stored: npt.NDArray[np.uint8], kind: str) -> bool:
    """Return whether all numbers are finite. `stored`: bytes (rows, bytes per row); `kind`: key of NOT_FINITE."""
    form, min_code = NOT_FINITE[kind]
    unsigned = np.iinfo(form).max >> 1
    rows = max(1, BYTES // stored.shape[1])
    for start in range(0, len(stored), rows):
        numbers = np.ascontiguousarray(stored[start : start + rows]).view(form)
        if ((numbers & unsigned) >= min_code).any():
            return False
    return True


def check_finite(info: CheckpointInfo) -> None:
    """Raise UserError for a NaN or infinite weight in the safetensors files, whose headers must have passed the checks."""

    def check(file: str) -> None:
        first, header = safetensors_header(info.path / file)
        header.pop("__metadata__", None)
        content = np.memmap(info.path / file, np.uint8, "r")[first:]
        for name, tensor in header.items():
            if tensor["dtype"] not in NOT_FINITE:  # integer codes
                continue
            begin, end = tensor["data_offsets"]
            numbers = content[begin:end].reshape(-1, np.dtype(NOT_FINITE[tensor["dtype"]][0]).itemsize)
            if not is_finite(numbers, tensor["dtype"]):
                raise refusal(
                    info.path,
                    f"{file}: {printable(name[:200])} holds NaN, infinity or a number beyond float32; give finite weights",
                )

    in_threads(check, info.weight_files)


def check_finite_gguf(header: Header) -> None:
    """Raise UserError with the tensor's name if a weight of a GGUF is NaN or infinite. Reads only the blocks' floats."""
    sizes = {kind: size for kind, _, size in tensor_types().values()}
    for name, tensor in header.tensors.items():
        if tensor.kind in GGUF_NUMBERS:
            kind, first, end = GGUF_NUMBERS[tensor.kind]
            stored = np.memmap(header.path, np.uint8, "r", tensor.offset, (tensor.nbytes,)).reshape(-1, sizes[tensor.kind])
            if not is_finite(stored[:, first:end], kind):
                raise header.error(f"tensor {name} holds a value that is not finite; convert the model again")
