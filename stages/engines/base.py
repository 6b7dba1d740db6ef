"""Helpers that several engines share: the sequence table, chunked prefill and common errors."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from stages.core.errors import UserError
from stages.engines.interface import Engine, Logits

Mode = Literal["prefill", "decode"]
"""Kind of an engine's step: a chunk of one prompt, or one new token per sequence."""

LOGIT_STEP = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 0.0}
"""Type of activations -> largest spacing of logits of this type, relative to the logit; 0 if it is negligible (float32)."""

S = TypeVar("S")


class SequenceTable(dict[int, S]):
    """State of an engine's live sequences, by handle. Handles are never reused."""

    def __init__(self) -> None:
        super().__init__()
        self._handles = count()

    def add(self, sequence: S) -> int:
        handle = next(self._handles)
        self[handle] = sequence
        return handle

    def __missing__(self, handle: int) -> NoReturn:
        raise KeyError(f"sequence {handle} was released or never started")


class ChunkedEngine(Engine):
    """An engine that prefills one prompt at a time, in chunks of at most `prefill_chunk` tokens."""

    def _prefill_batch(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        handles: list[int] = []
        logits = np.zeros((len(prompts), self.vocab_size), np.float32)
        try:
            for i, prompt in enumerate(prompts):
                handles.append(self._start())
                logits[i] = self._prefill(handles[-1], prompt)
        except BaseException:
            self.release(handles)
            raise
        return handles, logits

    def _chunks(self, prompt: Sequence[int]) -> Iterator[Sequence[int]]:
        for begin in range(0, len(prompt), self.prefill_chunk):
            yield prompt[begin : begin + self.prefill_chunk]

    @abstractmethod
    def _start(self) -> int:
        """Start an empty sequence and return its handle."""

    @abstractmethod
    def _prefill(self, sequence: int, prompt: Sequence[int]) -> Logits:
        """Append prompt tokens to a sequence and return the logits (vocab_size,) of the last token."""


def check_finite(finite: npt.NDArray[np.bool_]) -> None:
    """Raise UserError unless each layer's keys, and its values, are finite as float16: `finite` (L, 2).

    The error names the lowest layer, because its NaN spreads to all higher layers.
    """
    for layer, side in np.argwhere(~finite):
        raise UserError(
            f"model.path: a {('key', 'value')[side]} of layer {layer} is not finite as a float16: check the checkpoint for "
            "NaN, infinite or very large weights"
        )
