"""Stores the baseline's log-probabilities: one safetensors file with one float32 tensor (tokens, vocab_size) per sample.

Size: scored tokens x vocab_size x 4 bytes. The tiny model's default evaluation takes about 20,000 x 1,024 x 4 = 80 MB; a
vocabulary of 128,000 makes that 10 GB, so lower `workloads.samples` or `max_scored_tokens` there. The file is
memory-mapped for writing and for reading, so that no more than a few rows are in memory.
Format: https://huggingface.co/docs/safetensors (8 bytes of little-endian header length, JSON header, data).
"""

import json
import math
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


class LogProbabilities:
    """Log-probabilities by sample id, in a memory-mapped file."""

    def __init__(self, path: Path, writable: bool = False) -> None:
        with path.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_bytes))
        self._data = np.memmap(path, dtype=np.uint8, mode="r+" if writable else "r", offset=8 + header_bytes)
        self._tensors = {name: (entry["shape"], entry["data_offsets"]) for name, entry in header.items()}

    @classmethod
    def create(cls, path: Path, tokens: dict[str, int], vocab_size: int) -> Self:
        """Create a file with a tensor for each sample; every value is NaN until it is written.

        Args:
            path: The file to create.
            tokens: Sample id -> scored tokens.
            vocab_size: Values of each row.
        """
        header: dict[str, object] = {}
        offset = 0
        for name, count in tokens.items():
            end = offset + count * vocab_size * 4
            header[name] = {"dtype": "F32", "shape": [count, vocab_size], "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + offset)
        store = cls(path, writable=True)
        for name in tokens:
            store.tensor(name)[:] = math.nan
        return store

    def tensor(self, name: str) -> Rows:
        """Return the rows of sample `name`, a view of the file of shape (scored tokens, vocab_size)."""
        shape, (start, end) = self._tensors[name]
        return self._data[start:end].view(np.float32).reshape(shape)

    def flush(self) -> None:
        """Write changed rows to the disk."""
        assert isinstance(self._data, np.memmap)
        self._data.flush()
