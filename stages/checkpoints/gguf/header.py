"""The header of a GGUF file: metadata, and the location of every tensor. Weights are not read.

Files are untrusted: every count, length and offset is checked against the file's size before memory is allocated.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stages.core.errors import MissingRequirement, UserError
from stages.core.redaction import printable
from stages.core.strict import LFS_POINTER, Unreadable, refuse_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32

MAX_VALUES = 4_000_000
"""Maximum metadata values of a file, including array elements. The largest vocabularies have 262,144 tokens and a similar
number of merges."""
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 256
MAX_DIMS = 4

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a metadata type -> struct format."""
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")

READABLE = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "NVFP4"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0"),
)
"""Tensor types that the package gguf can dequantize."""


@cache
def tensor_types() -> dict[int, tuple[str, int, int]]:
    """Return number of a tensor type -> (name, values per block, bytes per block)."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        return {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in map(GGMLQuantizationType.__getitem__, READABLE)}
    except (ImportError, KeyError):  # missing, or an old release without some types
        raise MissingRequirement("model.path: reading a GGUF needs the package gguf: pip install 'gguf>=0.19,<0.20'") from None


@dataclass(frozen=True)
class GGUFTensor:
    kind: str
    """Name of the type, one of READABLE."""
    shape: tuple[int, ...]
    """Shape in PyTorch's order, rows before columns; GGUF files use the reverse order."""
    offset: int
    """Offset from the start of the file in bytes."""
    nbytes: int


@dataclass(frozen=True)
class Header:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def error(self, problem: str) -> UserError:
        return _error(self.path, problem)


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0
        self._values_left = MAX_VALUES

    def _advance(self, size: int) -> int:
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise Unreadable("it is truncated: the header continues beyond the end of the file")
        return start

    def values(self, form: str, count: int = 1) -> tuple[Any, ...]:
        start = self._advance(struct.calcsize(f"<{form}") * count)
        return struct.unpack_from(f"<{count}{form}", self._data, start)

    def integer(self, form: str) -> int:
        return int(self.values(form)[0])

    def string(self, longest: int | None = None) -> str:
        (length,) = LENGTH.unpack_from(self._data, self._advance(LENGTH.size))
        if longest is not None and length > longest:
            raise Unreadable(f"a name has {length:,} bytes, over {longest}; download the file again")
        start = self._advance(length)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError:
            raise Unreadable("a text in its header is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind != ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = self.integer("I"), self.integer("Q")
        if kind == ARRAY:
            raise Unreadable("an array contains arrays, which no model's metadata does")
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        self._values_left -= count
        if self._values_left < 0:
            raise Unreadable(f"more than {MAX_VALUES:,} values of metadata")
        if kind == STRING:
            return [self.string() for _ in range(count)]
        if kind not in SCALARS:
            raise Unreadable(f"metadata type {kind} does not exist")
        return list(self.values(SCALARS[kind], count))


def read_header(path: Path) -> Header:
    try:
        with path.open("rb") as stream:
            start = stream.read(len(LFS_POINTER))
            refuse_pointer(start)
            if not start.startswith(MAGIC):
                raise Unreadable("not a GGUF file; give a GGUF, or the directory of a Hugging Face checkpoint")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, _Cursor(data), len(data))
    except Unreadable as error:
        problem = str(error)
        raise _error(path, problem if ";" in problem else f"{problem}; download it again, or convert the model again") from None
    except OSError as error:
        raise _error(path, f"cannot be read ({error.strerror}); give a readable file") from None


def _error(path: Path, problem: str) -> UserError:
    """Return the error for a file. The problem may quote the file, so unprintable characters are replaced."""
    return UserError(f"model.path={path}: {printable(problem)}")


def _read(path: Path, cursor: _Cursor, size: int) -> Header:
    cursor.at = len(MAGIC)
    version = cursor.integer("I")
    if version & 0xFFFF == 0:
        raise Unreadable("a big-endian GGUF; convert the model again on a little-endian machine")
    if version not in VERSIONS:
        raise Unreadable(f"GGUF version {version}; convert the model again, as version {VERSIONS[-1]}")
    tensor_count, key_count = cursor.integer("Q"), cursor.integer("Q")
    if tensor_count > MAX_TENSORS:
        raise Unreadable(f"{tensor_count:,} tensors, over {MAX_TENSORS:,}; download the file again")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):  # ends at the latest with the file or the limit of values
        key = cursor.string(MAX_NAME_BYTES)
        if key in metadata:
            raise Unreadable(f"{key} appears twice")
        metadata[key] = cursor.value(cursor.integer("I"))
    _refuse_part(metadata)
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise Unreadable(f"general.alignment={alignment}; it must be a power of two")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, number, offset in entries:
        if name in tensors:
            raise Unreadable(f"tensor {name} appears twice")
        tensors[name] = _tensor(name, shape, number, start + offset, size)
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset != -(-end // alignment) * alignment:
            raise Unreadable(f"tensor {name} begins at byte {tensor.offset:,}, but the previous tensor ends at byte {end:,}")
        end = tensor.offset + tensor.nbytes
    return Header(path, metadata, tensors)


def _refuse_part(metadata: dict[str, Any]) -> None:
    shards = metadata.get("split.count", 0)
    if shards not in (0, 1):
        raise Unreadable(f"one of {shards} shards; join them with llama-gguf-split --merge")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise Unreadable(f"general.type={kind}; give the GGUF of a whole model")


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string(MAX_NAME_BYTES)
    dims = cursor.integer("I")
    if not 1 <= dims <= MAX_DIMS:
        raise Unreadable(f"tensor {name} has {dims} dimensions; convert the model again, with 1 to {MAX_DIMS}")
    shape = tuple(reversed(cursor.values("Q", dims)))
    return name, shape, cursor.integer("I"), cursor.integer("Q")


def _tensor(name: str, shape: tuple[int, ...], number: int, offset: int, size: int) -> GGUFTensor:
    if number not in tensor_types():
        raise Unreadable(
            f"tensor {name} has type {number}, which is not supported; convert the model to one of "
            "F32, F16, BF16, Q8_0, Q6_K, Q5_K, Q4_K, Q4_0"
        )
    kind, block, block_bytes = tensor_types()[number]
    if min(shape) < 1 or shape[-1] % block:
        raise Unreadable(f"tensor {name} of type {kind} has shape {shape}; rows must be whole blocks of {block}")
    nbytes = math.prod(shape) // block * block_bytes
    if offset + nbytes > size:
        raise Unreadable(f"it is truncated: tensor {name} ends at byte {offset + nbytes:,} of {size:,}; download it again")
    return GGUFTensor(kind, shape, offset, nbytes)
