"""What `llama_state_seq_get_data` returns of a sequence: where its keys and values lie in it (src/llama-kv-cache.cpp)."""

from pathlib import Path
from typing import Any

import numpy as np

SCALED = {1: (2, 1), 2: (18, 1), 3: (20, 2), 7: (24, 2), 8: (34, 1), 20: (18, 1)}
"""Number of a ggml_type -> bytes of a block, and how many float16 at its beginning its numbers are proportional to: of f16 the
number itself, else the scale, and the minimum where there is one."""


class State:
    """Views into the bytes of a state: what is changed there is changed in it."""

    def __init__(self, state: Any) -> None:
        self.bytes, self._place = state, 8  # a magic number, and the sequence
        self.kinds: list[int] = []
        """ggml_type of each part."""
        self.parts: list[Any] = []
        """Keys of every layer, then values: (tokens, bytes of a token)."""
        self.tokens = 0
        for _ in range(self._number("u4")):
            cells = self._number("u4")
            if cells:
                self._stream(cells)
        if self._place != len(self.bytes):
            raise RuntimeError(f"the state has {len(self.bytes)} bytes, {self._place} were read")

    def _stream(self, cells: int) -> None:
        self.tokens = cells
        positions = []
        for _ in range(cells):
            positions.append(self._number("i4"))
            sequences = self._number("u4")
            self._place += 4 * sequences
        if positions != list(range(cells)):
            raise RuntimeError(f"tokens lie at positions {positions[:8]}... of the state, and not in their order")
        transposed, layers = self._number("u4"), self._number("u4")
        for part in range(2 * layers):
            self.kinds.append(self._number("i4"))
            turned = transposed and part >= layers
            width = self._number("u4") * self._number("u4") if turned else self._number("u8")
            view = self.bytes[self._place : self._place + cells * width]
            self.parts.append(view.view("<u2").reshape(-1, cells).T if turned else view.reshape(cells, width))
            self._place += cells * width

    def _number(self, kind: str) -> int:
        width = int(kind[1:])
        number = int(self.bytes[self._place : self._place + width].view("<" + kind)[0])
        self._place += width
        return number

    def write(self, path: Path) -> None:
        """Write keys, then values, of every layer as they are stored: tokens, one after the other."""
        layers = len(self.parts) // 2
        with path.open("wb") as stream:
            for layer in range(layers):
                for part in self.parts[layer::layers]:
                    stream.write(np.ascontiguousarray(part).tobytes())

    def multiply_keys(self, factor: float, first: int) -> int:
        """Multiply the keys from token `first` on; return the tokens."""
        for kind, part in list(zip(self.kinds, self.parts, strict=True))[: len(self.parts) // 2]:
            size, scales = SCALED[kind]
            chosen = part[first:]
            blocks = np.ascontiguousarray(chosen).reshape(len(chosen), -1, size)
            numbers = np.ascontiguousarray(blocks[..., : 2 * scales]).view("<f2")
            blocks[..., : 2 * scales] = (numbers * np.float16(factor)).view(np.uint8)
            part[first:] = blocks.reshape(chosen.shape)
        return self.tokens
