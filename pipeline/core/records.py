"""Records that stages exchange, and the protocols of engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pipeline.core.kv import KVPolicy, KVShape, Side

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Progress = Callable[[str, int, int], None]
"""Reports a stage's progress: (what it is doing, units done, units in all). The unit may follow in brackets: `forced decode
[tokens]`. Without units, (text, 0, 0), it is a message, which is shown at once."""


def no_progress(label: str, done: int, total: int) -> None:
    """Tell nobody."""


LineCheck = Literal["none", "exact", "mention", "json", "tool_call"]
"""The checks that a line of the user's own file may ask for."""
Check = Literal[LineCheck, "bfcl"]

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
    """How an answer is judged: not at all, as text, by what it mentions, as JSON, as a call of one of `tools`, or by BFCL."""
    document: str = ""
    """The bootstrap resamples the samples of one document together. Empty: the sample is a document of its own."""
    depth: float | None = None
    """Retrieval: relative position of the needle in the prompt, 0 to 1."""
    tools: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Allowed tools and their argument names."""
    expected: str = ""
    """Check "bfcl": JSON of the category, the functions and the possible answers."""
    mentions: tuple[str, ...] = ()
    """For check "mention": what a right answer mentions, all of it; the reference where it is empty."""
    distractors: tuple[str, ...] = ()
    """For check "mention": what a right answer does not mention."""
    difficulty: str = ""
    """Graded workloads: "easy", "medium" or "hard"."""

    @property
    def cluster(self) -> str:
        """The document, or the id of a sample without one."""
        return self.document or self.id


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of the cache, as allocated."""

    pool_bytes: int
    exact_bytes: int
    window_bytes: int
    static_scale_bytes: int
    pages: int
    live_tokens: int
    held_pages: int = 0
    """Pages that are not free; 0 where an engine doesn't show it."""


class Engine(Protocol):
    """A loaded engine bundle. Sequences are integer handles; logits are float32 of shape (batch, vocab_size)."""

    policy: KVPolicy
    shape: KVShape
    vocab_size: int

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Start one sequence for each prompt and return their handles with the logits of each prompt's last token.

        The logits of a prompt of at most PREFILL_CHUNK tokens do not read the quantized cache.
        """
        ...

    def decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append one token to each sequence and return its logits, computed from the quantized cache."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_token: int | None,
        *,
        max_sequences: int | None = None,
        ended: Callable[[int], None] = lambda _: None,
    ) -> list[list[int]]:
        """Greedy continuations without the stop token, of at most `max_sequences` at once; None for all prompts at once.

        `ended` is called with how many have ended.
        """
        ...

    def release(self, sequences: Sequence[int]) -> None:
        """Free the sequences' pages."""
        ...

    def memory(self) -> MemoryReport: ...

    def corrupt_key_scale(self, factor: float) -> None:
        """Multiply the key scales that decoding reads, or the stored keys where there are none: the canary's fault."""
        ...


@runtime_checkable
class OnePassEngine(Engine, Protocol):
    """An engine that computes the forced decode of a whole sequence in one pass."""

    def forced(self, tokens: Sequence[int], first: int) -> npt.NDArray[np.float32]:
        """Return the logits of forced decode, (len(tokens) - first, vocab_size). No sequence stays in the engine.

        Row r is what `decode` returns for tokens[first + r] after `prefill` of tokens[:first], at least one token, and
        `decode` of the tokens between.
        """
        ...


@runtime_checkable
class SharingEngine(Engine, Protocol):
    """An engine whose sequences can share what they have in common."""

    max_sequences: int | None
    """Most sequences that may live at once; None where only memory limits them."""

    def fork(self, sequence: int) -> int:
        """Start a sequence with the same tokens, which shares the full pages of the first, and return its handle."""
        ...

    def extend(self, sequence: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append tokens of a prompt to a sequence, as a later chunk of its prefill; return the logits (V,) of the last."""
        ...


@runtime_checkable
class CorruptibleEngine(Engine, Protocol):
    """An engine that can be given small faults: the rungs of the canary's ladder."""

    def corrupt_scale(self, side: Side, factor: float, layer: int | None = None, head: int | None = None) -> None:
        """Multiply the scales that decoding reads keys or values with, or what is stored where there are none.

        It is those of one layer and one of its KV heads, or of all; a layer whose heads share a scale takes all of them. The
        inverse factor takes it back.
        """
        ...

    def repeat_page(self) -> None:
        """Let the second page of every live sequence hold what its first one does, as a page that was not written would."""
        ...


@dataclass(frozen=True)
class StoredCopy:
    """One copy of consecutive tokens of one side of one layer, as it lies in an engine's memory.

    H KV heads, n tokens, W bytes and g scales of a token. The order of codes within a byte is that of
    `stages.engines.paged.layout.PACKED`.
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


@runtime_checkable
class ReadableEngine(Engine, Protocol):
    """An engine that shows what it stored."""

    prefill_chunk: int
    """Tokens of one prefill run."""

    def stored(self, sequence: int) -> Sequence[Mapping[Side, StoredCopy]]:
        """Return the copies of every layer that a sequence's pages hold. The exact tokens' own buffers are no part of it."""
        ...


@runtime_checkable
class RequestEngine(OnePassEngine, Protocol):
    """An engine that serves whole requests: what it decodes together is requests, not steps."""

    def forced_together(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[npt.NDArray[np.float32]]:
        """Return what `forced` returns of each (tokens, first), of requests that are in flight at once."""
        ...


@runtime_checkable
class ReadableRequests(RequestEngine, Protocol):
    """An engine that shows what it stored of its requests."""

    prefill_chunk: int

    def stored_request(self, number: int) -> Sequence[Mapping[Side, StoredCopy]]:
        """Return what the cache held of a request of the last `forced_together`, as `ReadableEngine.stored`.

        Empty where the engine cannot tell how its cache lies in memory.
        """
        ...


@runtime_checkable
class ReusingEngine(RequestEngine, Protocol):
    """An engine that serves with prefixes that earlier requests left in its cache."""

    def forced_reusing(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[npt.NDArray[np.float32]]:
        """Return what `forced` returns of each (tokens, first), with every prefix taken from the cache."""
        ...


@dataclass(frozen=True)
class LayerDelivery:
    """Static scales of one layer: those that a checkpoint carries, and those that the loaded engine uses."""

    carried: dict[Side, tuple[float, ...]]
    """A side that has none is absent."""
    used: dict[Side, tuple[float, ...]]


@runtime_checkable
class DeliveredScales(Engine, Protocol):
    """An engine of another library, which loads the scales of its checkpoint by itself."""

    def delivery(self) -> Sequence[LayerDelivery]:
        """Return the scales of every layer."""
        ...


@runtime_checkable
class BoundedEngine(Engine, Protocol):
    """An engine that was built for so many tokens and sequences and no more."""

    max_tokens: int
    """Most tokens of a sequence."""
    max_batch: int
    """Most sequences of a decode step."""


@dataclass(frozen=True)
class LoadTimes:
    """Measured times of one load of prompts on an engine."""

    first_token_ms: list[float]
    """Time to the first token of each prompt; prompts are prefilled alone, one after the other."""
    step_ms: list[float]
    """Decode steps of all sequences together, in order."""
    memory: MemoryReport
    """Memory of the cache at the last decode step."""


@runtime_checkable
class ThreadedEngine(Engine, Protocol):
    """An engine that computes on a CPU, with as many threads as it was told."""

    threads: int


@runtime_checkable
class AttentionEngine(Engine, Protocol):
    """An engine whose decode attention can be computed in several ways."""

    attention: str
    """The one that is."""


@runtime_checkable
class TimedEngine(Engine, Protocol):
    """An engine that serves whole requests, so that its steps cannot be timed from outside."""

    def timed(self, prompts: Sequence[Sequence[int]], steps: int) -> LoadTimes:
        """Return the times of `steps` decode steps after the first token of every prompt."""
        ...
