"""What every engine does for this benchmark, and what it is opened with.

Shapes: B sequences, S tokens, V tokens of the vocabulary.
"""

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Setting:
    """What every engine of a run is opened with."""

    checkpoint: Path
    """A Hugging Face checkpoint."""
    models: Path
    """Where this engine's own form of the model lies."""
    threads: int
    capacity: int
    """Most tokens of a sequence."""
    batch: int
    """Most sequences at once."""
    batch_prefill: int
    """Most tokens that a batch is prefilled with by an engine that cannot copy a prompt's cache."""
    tokens: list[int]
    """Of all texts, one after the other."""
    calibration: tuple[int, ...]
    """Tokens to measure static scales over."""

    def check_batch_prefill(self, tokens: int) -> None:
        """Raise RuntimeError when a batch of `tokens` tokens would take too long to prefill."""
        if tokens > self.batch_prefill:
            raise RuntimeError(f"its batch must be prefilled, {tokens} tokens, and --batch-prefill is {self.batch_prefill}")


class Peer(ABC):
    """One KV format of an engine: a sequence, later copies of it, decoded step by step."""

    title: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    """What must be importable in its process."""
    distributions: ClassVar[tuple[str, ...]]
    """Whose versions are recorded."""
    install: ClassVar[str]
    """Arguments of `pip install --target`; empty where kvgate's own extras bring it."""
    formats: ClassVar[dict[str, str]]
    """Its KV formats and their widths; the first one is float, and the others' distance is taken to it."""
    weights: ClassVar[str]

    def __init__(self, kv: str, setting: Setting) -> None:
        self.kv, self.setting = kv, setting

    @classmethod
    @abstractmethod
    def prepare(cls, setting: Setting) -> None:
        """Bring the checkpoint into the engine's form, where that is not done yet."""

    @abstractmethod
    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Start a sequence, dropping the last one; returns the logits (V,) after the last token."""

    @abstractmethod
    def replicate(self, batch: int) -> None:
        """Turn the sequence into `batch` sequences, whose caches lie in memory of their own.

        Raises RuntimeError where the cache cannot be copied and the batch is too long to prefill.
        """

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> Logits:
        """Decode one token of each sequence; returns logits (B, V), which the next call may overwrite."""

    @abstractmethod
    def bytes_per_token(self) -> float:
        """Return the bytes of the cache a token of one sequence, after a prefill."""


def run_python(*arguments: str) -> None:
    """Run Python in a process of its own, so that what it imports holds no memory while an engine is timed."""
    process = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{arguments[1][:60].strip()} failed: {process.stderr.strip()[-600:]}")
