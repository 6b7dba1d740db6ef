"""Safetensors files as raw bytes: checkpoints hold FP8 and bfloat16, which numpy has no types for.

Format: https://huggingface.co/docs/safetensors (8 bytes of little-endian header length, JSON header, data).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class RawTensor:
    """A tensor whose elements are unsigned integers of its type's size."""

    dtype: str
    values: npt.NDArray[np.unsignedinteger]

    @classmethod
    def scalar(cls, value: float) -> "RawTensor":
        """Return a float32 tensor of shape (1,), like ModelOpt's scales."""
        return cls("F32", np.array([value], "<f4").view("<u4"))

    def number(self) -> float:
        """Return the value of a float32 tensor with one element."""
        assert self.dtype == "F32"
        assert self.values.size == 1
        return float(self.values.reshape(1).view("<f4")[0])


def read_tensors(path: Path) -> dict[str, RawTensor]:
    """Return all tensors of a file, memory-mapped."""
    with path.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + header_bytes)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        kind = np.dtype(f"<u{BYTES[entry['dtype']]}")
        tensors[name] = RawTensor(entry["dtype"], np.frombuffer(data[begin:end], kind).reshape(entry["shape"]))
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Write a file with these tensors, one at a time."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.values.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.values.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stream.write(np.ascontiguousarray(tensor.values).tobytes())
