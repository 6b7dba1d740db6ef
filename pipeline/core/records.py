"""Records that stages exchange."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pipeline.core.kv import Side

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")
R = TypeVar("R")

Progress = Callable[[str, int, int], None]
"""Reports a stage's progress: (what it is doing, units done, units in all). The unit may follow in brackets: `forced decode
[tokens]`. Without units, (text, 0, 0), it is a message, which is shown at once."""


def no_progress(label: str, done: int, total: int) -> None:
    """Tell nobody."""


LineCheck = Literal["none", "exact", "mention", "json", "tool_call"]
Check = Literal[LineCheck, "number"]

PREFILL_CHUNK = 1024
"""Tokens of one prefill run. They attend to each other exactly, and to earlier chunks through the quantized cache."""


@dataclass(frozen=True)
class Sample:
    """One prompt with a known answer: `messages`, which the tokenizer's chat template renders, or raw text in `prompt`."""

    id: str
    workload: str
    reference: str
    messages: tuple[tuple[str, str], ...] = ()
    prompt: str = ""
    check: Check = "exact"
    """How an answer is judged: not at all, as text, by what it mentions, as JSON, as a call of one of `tools`, or by its last
    number."""
    document: str = ""
    """The bootstrap resamples the samples of one document together. Empty: the sample is a document of its own."""
    depth: float | None = None
    """Retrieval: relative position of the needle in the prompt, 0 to 1."""
    tools: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Allowed tools and their argument names."""
    mentions: tuple[str, ...] = ()
    """For check "mention": what a right answer mentions, all of it; the reference where it is empty."""
    distractors: tuple[str, ...] = ()
    """For check "mention": what a right answer does not mention."""
    difficulty: str = ""
    """Graded workloads: "easy", "medium" or "hard"."""
    results: tuple[tuple[int, int], ...] = ()
    """What of the reference says whether it is right, each part by its first character and its end; empty: all of it."""

    @property
    def cluster(self) -> str:
        return self.document or self.id


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of the cache, as allocated."""

    pool_bytes: int
    exact_bytes: int
    window_bytes: int
    pages: int
    live_tokens: int
    held_pages: int = 0
    """Pages that are not free; 0 where an engine doesn't show it."""
    window_pages: int = 0
    """Pages of the second pool, which has the finer copies of a policy's window."""


@dataclass(frozen=True)
class StoredCopy:
    """One copy of consecutive tokens of one side of one layer, as it lies in an engine's memory.

    H KV heads, n tokens, W bytes and g scales of a token. The order of codes within a byte is that of
    `pipeline.formats.spec.PACKED`.
    """

    first: int
    """Position of the first token."""
    codes: npt.NDArray[np.uint8]
    """(H, n, W)."""
    scale: npt.NDArray[np.float16] | npt.NDArray[np.uint8] | None
    """(H, n, g), of NVFP4 E4M3's bytes; None for static and exact formats."""
    zero: npt.NDArray[np.float16] | None
    static_scale: npt.NDArray[np.float32] | None
    """(1 | H, 1, 1 | D), as attention reads it; None for dynamic and exact formats."""
    static_zero: npt.NDArray[np.float32] | None
    evicted: tuple[int, int] = (0, 0)
    """First and one past the last position of tokens that were evicted: theirs are zeros."""


@dataclass(frozen=True)
class LayerDelivery:
    """Static scales of one layer: those that a checkpoint carries, and those that the loaded engine uses."""

    carried: dict[Side, tuple[float, ...]]
    """A side that has none is absent."""
    used: dict[Side, tuple[float, ...]]


@dataclass(frozen=True)
class LoadTimes:
    first_token_ms: list[float]
    """Time to the first token of each prompt; prompts are prefilled alone, one after the other."""
    step_ms: list[float]
    """Decode steps of all sequences together, in order."""
    memory: MemoryReport


@dataclass(frozen=True)
class Drafting:
    """What an engine says of itself when it speculates."""

    answers: list[list[int]]
    """Tokens of each request."""
    passes: list[int]
    """Passes that said them, that of the prompt included."""
    drafts: int
    """The engine's own counters: proposals, and the tokens that they proposed and that were accepted."""
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Pressed:
    """A request that was served among others, as far as the engine tells."""

    logits: npt.NDArray[np.float32]
    """(rows, vocab_size), of its last tokens."""
    preempted: int
    """How often it gave way and was computed again."""
    reused: int
    """Tokens of its prompt that were taken from earlier requests."""
    pages: tuple[int, ...]
    """Numbers of the pages that it held in the end."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call `function` for each item, on a thread per core, and return the results in order.

    For functions that release the GIL: hashing, copying, and NumPy over large arrays. Raises the first call's error, and drops
    the calls that have not started.
    """
    items = list(items)
    if len(items) < 2:
        return [function(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, items))


def return_large_blocks() -> None:
    """Have the C library return blocks of 8 MiB and more as soon as they are freed.

    Left alone glibc raises that bound with the blocks that it sees, up to 32 MiB, and keeps the holes between smaller ones: a
    process that loads one engine after the other then peaks 0.3 GB higher.
    """
    _libc("mallopt", M_MMAP_THRESHOLD, 8 << 20)
    _libc("mallopt", M_TRIM_THRESHOLD, 64 << 20)


def give_back() -> None:
    """Collect cycles, as models and graphs are, and return to the system what the C library and torch would keep."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    give_back_freed()


def give_back_freed() -> None:
    """Return to the system what the C library would keep for itself."""
    _libc("malloc_trim", 0)


def _libc(name: str, *numbers: int) -> None:
    """Call a function of the C library, where the library has one of the name."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*numbers)
