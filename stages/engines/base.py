"""The base classes of the engines: checks of tokens, handles of sequences, greedy generation, rollback of a failed prefill."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

LOGIT_STEP = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 0.0}
"""By type of activations, two units in the last place of a logit, relative to it: a model's last product is rounded to it."""

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


@dataclass(eq=False)
class Continuation:
    """A prompt of `generate`, and how far it has come."""

    tokens: list[int]
    """The prompt, then its continuation."""
    prompt_tokens: int
    most_tokens: int
    """Tokens of the prompt and of the longest continuation that is asked for."""
    sequence: int = -1
    """Handle of its sequence; -1 before it is started."""
    stored: int = 0
    """How many of `tokens` its sequence holds."""


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
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_token: int | None,
        *,
        max_sequences: int | None = None,
        ended: Callable[[int], None] = lambda _: None,
    ) -> list[list[int]]:
        """Return greedy continuations without the stop token, in the order of the prompts.

        A finished sequence leaves the batch and is released, and the next prompt takes its place at once.

        Args:
            prompts: Token ids of each prompt.
            max_new_tokens: The most tokens of every continuation, or of each.
            stop_token: The token that ends a continuation, if any.
            max_sequences: Most sequences that live at once; None for one of every prompt.
            ended: Called with how many continuations have ended, whenever one does.

        Raises:
            UserError: As `prefill`, for any of the prompts before one is started; and for logits that are not finite, from
                which no token is picked. `prefill` and `decode` return such logits, since an evaluation counts them.
        """
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        if len(limits) != len(prompts) or min(limits, default=1) < 1:
            raise UserError(f"max_new_tokens must be at least 1 for each of {len(prompts)} prompts, got {limits}")
        if max_sequences is not None:
            check_positive(max_sequences=max_sequences)
        for prompt in prompts:
            check_tokens(prompt, self.vocab_size)
        continuations = [
            Continuation(list(prompt), len(prompt), len(prompt) + limit) for prompt, limit in zip(prompts, limits, strict=True)
        ]
        self._answer(continuations, stop_token, len(prompts) if max_sequences is None else max_sequences, ended)
        return [one.tokens[one.prompt_tokens :] for one in continuations]

    def _answer(
        self,
        continuations: Sequence[Continuation],
        stop_token: int | None,
        max_sequences: int,
        on_end: Callable[[int], None],
    ) -> None:
        """Continue every one to its end, at most `max_sequences` of them at once."""
        waiting, live = deque(continuations), list[Continuation]()
        try:
            while waiting or live:
                while waiting and len(live) < max_sequences:
                    live.append(waiting.popleft())
                advanced, logits = self._advance(live)
                broken = np.flatnonzero(~np.isfinite(logits).all(-1))
                if broken.size:
                    one = advanced[int(broken[0])]
                    raise UserError(
                        f"logits of sequence {one.sequence} after {len(one.tokens)} tokens are not "
                        "finite: check the checkpoint for NaN or infinite weights, and whether keys or values overflow float16"
                    )
                ended = []
                for one, token in zip(advanced, logits.argmax(-1).tolist(), strict=True):
                    if token != stop_token:
                        one.tokens.append(token)
                    if token == stop_token or len(one.tokens) == one.most_tokens:
                        ended.append(one)
                live = [one for one in live if one not in ended]
                self._release_all(ended)
                if ended:
                    on_end(len(continuations) - len(waiting) - len(live))
        finally:
            self._release_all(live)

    def _advance(self, live: Sequence[Continuation]) -> tuple[Sequence[Continuation], Logits]:
        """Take one step: prefill those that have no sequence yet or, where all have one, decode.

        An engine that computes both in one pass overrides it.

        Returns:
            The continuations of which every token is stored now, and the logits (continuations, vocab_size) after these tokens.
        """
        joining = [one for one in live if one.sequence < 0]
        if joining:
            handles, logits = self.prefill([one.tokens for one in joining])
            for one, handle in zip(joining, handles, strict=True):
                one.sequence, one.stored = handle, len(one.tokens)
            return joining, logits
        logits = self.decode([one.sequence for one in live], [one.tokens[-1] for one in live])
        for one in live:
            one.stored += 1
        return live, logits

    def _release_all(self, continuations: Sequence[Continuation]) -> None:
        """Release the sequences of continuations, as far as they were started."""
        self.release([one.sequence for one in continuations if one.sequence >= 0])

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
        except BaseException:
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
