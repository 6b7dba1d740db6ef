"""Checks that weights are finite as float32. Non-negative floats are ordered like their bits, so comparing bits is enough."""

import numpy as np

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
"""Weight type -> unsigned integer type of equal width, and the smallest bits without the sign that are not finite."""
BYTES = 1 << 20
"""Bytes per step; they fit into the processor's cache."""


def check_finite(info: CheckpointInfo) -> None:
    """Raise UserError for a NaN or infinite weight in the safetensors files, whose headers must have passed the checks."""

    def check(file: str) -> None:
        first, header = safetensors_header(info.path / file)
        header.pop("__metadata__", None)
        content = np.memmap(info.path / file, np.uint8, "r")[first:]
        for name, tensor in header.items():
            if tensor["dtype"] not in NOT_FINITE:  # integer codes
                continue
            form, min_code = NOT_FINITE[tensor["dtype"]]
            magnitude_bits, (begin, end) = np.iinfo(form).max >> 1, tensor["data_offsets"]
            for start in range(begin, end, BYTES):
                codes = np.array(content[start : min(start + BYTES, end)]).view(form)
                if ((codes & magnitude_bits) >= min_code).any():
                    raise refusal(
                        info.path,
                        f"{file}: {printable(name[:200])} holds NaN, infinity or a number beyond float32; give finite weights",
                    )

    in_threads(check, info.weight_files)
