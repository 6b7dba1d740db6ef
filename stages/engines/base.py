"""The base classes of the engines: checks of tokens, handles of sequences, greedy generation, rollback of a failed prefill."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy, KVShape
from pipeline.core.records import MemoryReport

Logits = npt.NDArray[np.float32]

Mode = Literal["prefill", "decode"]
"""One step of an engine: a chunk of a prompt, or one new token of each sequence."""

S = TypeVar("S")


class SequenceTable(dict[int, S]):
    """State of the live sequences of an engine, by handle. A handle is never given to a second sequence."""

    def __init__(self) -> None:
        super().__init__()
        self._handles = count()

    def add(self, sequence: S) -> int:
        """Store a new sequence and return its handle."""
        handle = next(self._handles)
        self[handle] = sequence
        return handle

    def __missing__(self, handle: int) -> NoReturn:
        raise KeyError(f"sequence {handle} was released or never started")


class EngineBase(ABC):
    """pipeline.core.records.Engine, but for the computation: a subclass implements the methods that begin with `_`.

    The public methods check their arguments, so that the others may rely on them.
    """

    def __init__(self, policy: KVPolicy, shape: KVShape, vocab_size: int) -> None:
        self.policy, self.shape, self.vocab_size = policy, shape, vocab_size

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        """Start one sequence for each prompt.

        Returns:
            The sequences' handles, and logits (len(prompts), vocab_size) of each prompt's last token.

        Raises:
            UserError: A prompt is empty or has ids outside the vocabulary, or the engine cannot hold it.
                No sequence is started then.
        """
        for prompt in prompts:
            check_tokens(prompt, self.vocab_size)
        return self._prefill_batch(prompts)

    def decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        """Append one token to each of distinct sequences.

        Returns:
            Logits (len(sequences), vocab_size), computed from the quantized cache.

        Raises:
            UserError: A token is outside the vocabulary, or the engine cannot hold it.
            ValueError: There is not one token for each of distinct sequences.
        """
        check_step(sequences, tokens, self.vocab_size)
        return self._decode(sequences, tokens)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], stop_token: int | None
    ) -> list[list[int]]:
        """Return greedy continuations without the stop token; a finished sequence leaves the batch and is released.

        Args:
            prompts: Token ids of each prompt.
            max_new_tokens: The most tokens of every continuation, or of each.
            stop_token: The token that ends a continuation, if any.

        Raises:
            UserError: As `prefill`, and for logits that are not finite, from which no token is picked.
                `prefill` and `decode` return such logits, since an evaluation counts them.
        """
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        if len(limits) != len(prompts) or min(limits, default=1) < 1:
            raise UserError(f"max_new_tokens must be at least 1 for each of {len(prompts)} prompts, got {limits}")
        handles, logits = self.prefill(prompts)
        continuations: list[list[int]] = [[] for _ in prompts]
        active = list(range(len(prompts)))
        try:
            while active:
                broken = np.flatnonzero(~np.isfinite(logits).all(-1))
                if broken.size:
                    i = active[int(broken[0])]
                    raise UserError(
                        f"logits of sequence {handles[i]} after {len(prompts[i]) + len(continuations[i])} tokens are not "
                        "finite: check the checkpoint for NaN or infinite weights, and whether keys or values overflow float16"
                    )
                unfinished = []
                for i, token in zip(active, logits.argmax(-1).tolist(), strict=True):
                    if token != stop_token:
                        continuations[i].append(token)
                    if token == stop_token or len(continuations[i]) == limits[i]:
                        self.release([handles[i]])
                    else:
                        unfinished.append(i)
                active = unfinished
                if active:
                    logits = self.decode([handles[i] for i in active], [continuations[i][-1] for i in active])
        except UserError:
            self.release([handles[i] for i in active])
            raise
        return continuations

    def release(self, sequences: Sequence[int]) -> None:
        """Free what the sequences hold; their handles are invalid from then on."""
        for sequence in sequences:
            self._release(sequence)

    @abstractmethod
    def memory(self) -> MemoryReport:
        """Return the bytes of the cache, as allocated."""

    @abstractmethod
    def corrupt_key_scale(self, factor: float) -> None:
        """Multiply the scales that decoding reads keys with, of stored and of later tokens; the codes stay right."""

    @abstractmethod
    def _prefill_batch(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        """As `prefill`, of checked prompts."""

    @abstractmethod
    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        """As `decode`, of a checked step."""

    @abstractmethod
    def _release(self, sequence: int) -> None:
        """Free what one sequence holds."""


class ChunkedEngine(EngineBase):
    """An engine that prefills one prompt after the other, in chunks of at most `prefill_chunk` tokens."""

    def __init__(self, policy: KVPolicy, shape: KVShape, vocab_size: int, prefill_chunk: int) -> None:
        super().__init__(policy, shape, vocab_size)
        self.prefill_chunk = prefill_chunk

    def _prefill_batch(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        handles: list[int] = []
        logits = np.zeros((len(prompts), self.vocab_size), np.float32)
        try:
            for i, prompt in enumerate(prompts):
                sequence, held = self._resume(prompt)
                handles.append(sequence)
                logits[i] = self._prefill(sequence, prompt[held:])
        except UserError:
            self.release(handles)
            raise
        return handles, logits

    def _chunks(self, prompt: Sequence[int]) -> Iterator[Sequence[int]]:
        """Cut a prompt into its chunks."""
        for begin in range(0, len(prompt), self.prefill_chunk):
            yield prompt[begin : begin + self.prefill_chunk]

    def _resume(self, prompt: Sequence[int]) -> tuple[int, int]:  # noqa: ARG002  (engines that keep prefixes need it)
        """Start the sequence of a prompt, and return its handle with the tokens that it holds already."""
        return self._start(), 0

    @abstractmethod
    def _start(self) -> int:
        """Start an empty sequence and return its handle."""

    @abstractmethod
    def _prefill(self, sequence: int, prompt: Sequence[int]) -> Logits:
        """Append a prompt, or a part of one, to a sequence and return the logits (vocab_size,) of its last token."""


class OnePassBase(EngineBase):
    """pipeline.core.records.OnePassEngine, but for the computation."""

    def forced(self, tokens: Sequence[int], first: int) -> Logits:
        """Compute forced decode of a whole sequence at once; no sequence stays behind.

        Returns:
            Logits (len(tokens) - first, vocab_size) of the tokens from `first` on, as prefill of the tokens before and then
            decode of these, one by one, would give them.

        Raises:
            UserError: The tokens are none, or outside the vocabulary.
            ValueError: `first` leaves no prefix, or no token to score.
        """
        self._check_forced(tokens, first)
        return self._forced(tokens, first)

    def _check_forced(self, tokens: Sequence[int], first: int) -> None:
        """Raise what `forced` raises."""
        check_tokens(tokens, self.vocab_size)
        if not 0 < first < len(tokens):
            raise ValueError(f"first must be 1 to {len(tokens) - 1}, got {first}")

    @abstractmethod
    def _forced(self, tokens: Sequence[int], first: int) -> Logits:
        """As `forced`, of checked tokens."""


def check_positive(**options: int) -> None:
    """Raise UserError for an option below 1."""
    for name, value in options.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise UserError for an empty prompt or ids outside the vocabulary."""
    if not len(tokens):
        raise UserError("a prompt must hold at least one token, got an empty one")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise UserError(f"token ids must be in [0, {vocab_size}), got {min(tokens)} to {max(tokens)}")


def check_step(sequences: Sequence[int], tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError unless a decode step has one token for each of distinct sequences, UserError as check_tokens."""
    if len(sequences) != len(tokens) or len(set(sequences)) != len(sequences):
        raise ValueError(f"decode takes one token for each of distinct sequences, got {sequences} and {tokens}")
    check_tokens(tokens, vocab_size)


def not_finite(side: str, layer: int, token: int, sequence: str) -> UserError:
    """Return the error for keys or values of which any is NaN or beyond float16."""
    return UserError(
        f"model.path: {side} of layer {layer}, token {token} of {sequence} is not finite as a float16: check the checkpoint "
        "for NaN, infinite or very large weights"
    )
