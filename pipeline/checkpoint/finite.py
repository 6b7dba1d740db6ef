"""Whether weights are finite: the exponent of a number that is NaN or infinite is all ones, so that nothing is computed."""

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.description import CheckpointInfo
from pipeline.checkpoint.files import refusal, safetensors_header
from pipeline.core.records import in_threads
from pipeline.core.redaction import printable

EXPONENTS = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E4M3": ("u1", 0x7F),  # NaN has all ones in the fraction as well, and nothing is infinite
}
"""Of each type of weights: the whole number of as many bits, and the bits of the exponent in it."""
BYTES = 1 << 20
"""That are looked at together: they stay in the processor's cache."""


def is_finite(stored: npt.NDArray[np.uint8], kind: str) -> bool:
    """Return whether numbers are finite.

    Args:
        stored: Their bytes, of shape (rows, bytes of a row).
        kind: One of EXPONENTS.
    """
    form, exponent = EXPONENTS[kind]
    rows = max(1, BYTES // stored.shape[1])
    for start in range(0, len(stored), rows):
        numbers = np.ascontiguousarray(stored[start : start + rows]).view(form)
        if ((numbers & exponent) == exponent).any():
            return False
    return True


def check_finite(info: CheckpointInfo) -> None:
    """Refuse a weight of a directory's safetensors that is NaN or infinite; the headers were found sound before."""

    def check(file: str) -> None:
        first, header = safetensors_header(info.path / file)
        header.pop("__metadata__", None)
        content = np.memmap(info.path / file, np.uint8, "r")[first:]
        for name, about in header.items():
            if about["dtype"] not in EXPONENTS:  # codes that are whole numbers
                continue
            begin, end = about["data_offsets"]
            numbers = content[begin:end].reshape(-1, np.dtype(EXPONENTS[about["dtype"]][0]).itemsize)
            if not is_finite(numbers, about["dtype"]):
                raise refusal(
                    info.path, f"{file}: {printable(name[:200])} holds NaN or infinity; give a checkpoint of finite weights"
                )

    in_threads(check, info.weight_files)
