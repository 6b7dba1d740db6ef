"""Check that weights are finite as float32. Floats without a sign are ordered like their bits, so comparing bits is enough."""

import numpy as np
import numpy.typing as npt

from stages.checkpoints.description import CheckpointInfo
from stages.checkpoints.files import refusal, safetensors_header
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
BYTES = 1 << 20
"""Bytes per step, few enough for the processor's cache."""


def is_finite(stored: npt.NDArray[np.uint8], kind: str) -> bool:
    """Return whether all numbers are finite.

    Args:
        stored: Bytes of the numbers, shape (rows, bytes per row).
        kind: Key of NOT_FINITE.
    """
    form, least = NOT_FINITE[kind]
    unsigned = np.iinfo(form).max >> 1
    rows = max(1, BYTES // stored.shape[1])
    for start in range(0, len(stored), rows):
        numbers = np.ascontiguousarray(stored[start : start + rows]).view(form)
        if ((numbers & unsigned) >= least).any():
            return False
    return True


def check_finite(info: CheckpointInfo) -> None:
    """Raise UserError for a NaN or infinite weight in the safetensors files, whose headers must have passed the checks."""

    def check(file: str) -> None:
        first, header = safetensors_header(info.path / file)
        header.pop("__metadata__", None)
        content = np.memmap(info.path / file, np.uint8, "r")[first:]
        for name, about in header.items():
            if about["dtype"] not in NOT_FINITE:  # integer codes
                continue
            begin, end = about["data_offsets"]
            numbers = content[begin:end].reshape(-1, np.dtype(NOT_FINITE[about["dtype"]][0]).itemsize)
            if not is_finite(numbers, about["dtype"]):
                raise refusal(
                    info.path,
                    f"{file}: {printable(name[:200])} holds NaN, infinity or more than a float32; give finite weights",
                )

    in_threads(check, info.weight_files)
