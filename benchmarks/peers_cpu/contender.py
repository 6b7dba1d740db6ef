"""What every peer's engine does for this benchmark.

Shapes: B sequences, V tokens of the vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Setting:
    """What every contender of a run is opened with."""

    checkpoint: Path
    """A Hugging Face checkpoint."""
    models: Path
    """Where this peer's own form of the model lies: its `prepare` wrote it."""
    threads: int
    capacity: int
    """Most tokens of a sequence."""
    batch: int
    """Most sequences at once."""
    batch_prefill: int
    """Most tokens that a batch is prefilled with by a peer that cannot copy a prompt's cache."""
    calibration: tuple[int, ...]
    """Tokens to measure static scales over."""

    def check_batch_prefill(self, tokens: int) -> None:
        """Raise RuntimeError when a batch of `tokens` tokens would take too long to prefill."""
        if tokens > self.batch_prefill:
            raise RuntimeError(f"its batch must be prefilled, {tokens} tokens, and --batch-prefill is {self.batch_prefill}")


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of the cache a token of one sequence."""

    per_token: float
    how: str
    """"measured" or "computed", and from what."""


class Contender(ABC):
    """One KV format of a peer: a sequence, later copies of it, decoded step by step."""

    @abstractmethod
    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Start a sequence, dropping the last one; returns the logits (V,) after the last token."""

    @abstractmethod
    def replicate(self, batch: int) -> None:
        """Turn the sequence into `batch` sequences, whose caches lie in memory of their own.

        Raises:
            RuntimeError: The peer cannot copy the cache, and the batch is too long to prefill.
        """

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> Logits:
        """Decode one token of each sequence; returns logits (B, V), which the next call may overwrite."""

    @abstractmethod
    def cache_bytes(self) -> CacheBytes:
        """Return the bytes of the cache, after a prefill."""

    @abstractmethod
    def close(self) -> None:
        """Release memory."""
