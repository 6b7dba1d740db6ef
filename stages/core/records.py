"""Records that stages exchange, and the base class of the records that an evaluation writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Progress = Callable[[str, int, int], None]
"""Callback that reports progress: (label, units done, total units). The label may end with the unit in brackets, for example
`forced decode [tokens]`. The call (text, 0, 0) prints a message at once."""


def no_progress(label: str, done: int, total: int) -> None:
    """Ignore the progress."""


Number = float | None
"""A measured number; null if it was not finite, because JSON has no NaN."""


class Record(BaseModel):
    """A part of a report or of a verdict: frozen, without unknown keys, NaN or infinity."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, allow_inf_nan=False)


def finite(value: Number) -> Number:
    """Return a number in the form of a record: None if it is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def or_infinite(value: Number) -> float:
    """Return a recorded distance; infinity if the record has null."""
    return math.inf if value is None else value


LineCheck = Literal["none", "exact", "mention", "json", "tool_call"]
Check = Literal[LineCheck, "number"]

PREFILL_CHUNK = 1024
"""Tokens per prefill chunk. They attend to each other exactly, and to earlier chunks through the quantized cache."""


@dataclass(frozen=True)
class Sample:
    """A prompt with a known answer: `messages`, which the tokenizer's chat template renders, or raw text in `prompt`."""

    id: str
    workload: str
    reference: str
    messages: tuple[tuple[str, str], ...] = ()
    prompt: str = ""
    check: Check = "exact"
    """Rule that judges the answer: none, exact text, required mentions, JSON, a call of a tool in `tools`, or the last
    number."""
    document: str = ""
    """Document that the sample belongs to; a verdict counts a document's samples as one number. Empty: only this sample."""
    tools: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Allowed tools and their argument names."""
    mentions: tuple[str, ...] = ()
    """For check "mention": texts that a right answer must all contain; if empty, the reference."""
    distractors: tuple[str, ...] = ()
    """For check "mention": texts that a right answer must not contain."""
    difficulty: str = ""
    """Graded workloads: "easy", "medium" or "hard"."""
    results: tuple[tuple[int, int], ...] = ()
    """Character ranges (start, end) of the reference whose probability counts; empty: the whole reference."""

    @property
    def cluster(self) -> str:
        return self.document or self.id

    @property
    def judged(self) -> bool:
        """Whether the answer to this sample is right or wrong. Prose is only scored."""
        return self.check != "none"


@dataclass(frozen=True)
class MemoryReport:
    """Allocated bytes and pages of the cache."""

    pool_bytes: int
    exact_bytes: int
    window_bytes: int
    pages: int
    live_tokens: int
    held_pages: int = 0
    """Pages in use, window pages included; 0 if the engine does not report them."""
    window_pages: int = 0
    """Pages of the second pool, which holds the finer copies of a policy's window."""


@dataclass(frozen=True)
class StoredCopy:
    """A stored copy of consecutive tokens of one side of one layer, in the layout of the engine's memory.

    Shapes: H KV heads, n tokens, W bytes and g scales per token. `stages.policies.spec.PACKED` defines the order of codes
    within a byte.
    """

    first: int
    """Position of the first token."""
    codes: npt.NDArray[np.uint8]
    """(H, n, W)."""
    scale: npt.NDArray[np.float16] | npt.NDArray[np.uint8] | None
    """(H, n, g), E4M3 bytes for NVFP4; None for static and exact formats."""
    zero: npt.NDArray[np.float16] | None
    static_scale: npt.NDArray[np.float32] | None
    """(1 | H, 1, 1 | D), as read by attention; None for dynamic and exact formats."""
    static_zero: npt.NDArray[np.float32] | None
    evicted: tuple[tuple[int, int], ...] = ()
    """Ranges (start, end) of evicted positions, whose entries mean nothing."""


@dataclass(frozen=True)
class LoadTimes:
    first_token_ms: list[float]
    """Time to first token by prompt, in milliseconds; every prompt is prefilled alone."""
    step_ms: list[float]
    """Durations in milliseconds of the decode steps of all sequences, in order."""
    memory: MemoryReport


@dataclass(frozen=True)
class ServedRequest:
    """Result of a request that was served together with other requests, as reported by the engine."""

    logits: npt.NDArray[np.float32]
    """(rows, vocab_size), logits of its last tokens."""
    preempted: int
    """Number of times that the request was preempted and recomputed."""
    reused: int
    """Prompt tokens that were reused from earlier requests."""
    pages: tuple[int, ...]
    """Numbers of the pages that the request held at its end."""
