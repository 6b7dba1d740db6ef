"""Drives an engine: forced decode and greedy decode over a continuously refilled batch, or forced decode in one pass.

The last token of a prompt is decoded instead of prefilled. **Every** logit, the first one included, is therefore computed
by the decode path from the quantized cache. Logits of a prefill attend over fresh keys and values and say nothing about
the cache.

Legend: B = sequences in the batch at that step, V = vocab_size.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.core.records import Engine, OnePassEngine
from stages.evaluate.tokens import EncodedSample

Logits = npt.NDArray[np.float32]

STEP_ROWS = 64
"""Rows of one step of a one-pass forced decode. The consumer of a step makes several copies of its logits."""


@dataclass(frozen=True)
class Step:
    """The logits of one decode step, a row for each decoded token."""

    samples: list[int]
    """Index of each row's sample."""
    positions: list[int]
    """Position in the sample's answer, from 0, of the token that each row predicts."""
    logits_BV: Logits


class _TokenSource(Protocol):
    """Decides which token a sequence is fed next, and when the sequence has ended."""

    def next_token(self, sample: int, position: int, greedy: int) -> int | None:
        """Return the token to feed once `position` tokens of the answer are known, None when the sequence is done.

        `greedy` is the most likely token at the position before.
        """
        ...


class _ReferenceTokens:
    """Feeds the tokens of the reference: forced decode."""

    def __init__(self, encoded: Sequence[EncodedSample]) -> None:
        self.encoded = encoded

    def next_token(self, sample: int, position: int, greedy: int) -> int | None:  # noqa: ARG002
        reference = self.encoded[sample].reference
        return reference[position - 1] if position < len(reference) else None


class _GreedyTokens:
    """Feeds the most likely tokens, and keeps them as the answers."""

    def __init__(self, limits: Sequence[int], stop_token: int) -> None:
        self.limits = limits
        self.stop_token = stop_token
        self.answers: list[list[int]] = [[] for _ in limits]

    def next_token(self, sample: int, position: int, greedy: int) -> int | None:
        if greedy == self.stop_token:
            return None
        self.answers[sample].append(greedy)
        return greedy if position < self.limits[sample] else None


@dataclass
class _LiveSequence:
    sample: int
    """Index of its sample."""
    handle: int
    position: int
    """Tokens of the answer that are known."""
    input_token: int
    """Token that the next decode step is fed."""


def _decode_in_batches(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    source: _TokenSource,
    batch_size: int,
    after_prefill: Callable[[], None] | None = None,
) -> Iterator[Step]:
    """Decode all samples; a finished sequence makes room for the next sample at once."""
    # Similar contexts run side by side: a decode step costs as many pages as its longest sequence has.
    queue = deque(sorted(range(len(encoded)), key=lambda i: len(encoded[i].prompt)))
    live: list[_LiveSequence] = []
    while queue or live:
        admitted = [queue.popleft() for _ in range(min(batch_size - len(live), len(queue)))]
        if admitted:
            handles, _ = engine.prefill([encoded[i].prompt[:-1] for i in admitted])
            live += [_LiveSequence(i, h, 0, encoded[i].prompt[-1]) for i, h in zip(admitted, handles, strict=True)]
            if after_prefill is not None:
                after_prefill()
        logits_BV = engine.decode([sequence.handle for sequence in live], [sequence.input_token for sequence in live])
        yield Step([sequence.sample for sequence in live], [sequence.position for sequence in live], logits_BV)
        greedy = logits_BV.argmax(axis=1)
        unfinished: list[_LiveSequence] = []
        finished: list[int] = []
        for sequence, token in zip(live, greedy.tolist(), strict=True):
            sequence.position += 1
            next_token = source.next_token(sequence.sample, sequence.position, token)
            if next_token is None:
                finished.append(sequence.handle)
            else:
                sequence.input_token = next_token
                unfinished.append(sequence)
        if finished:
            engine.release(finished)
        live = unfinished


def forced_decode(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    batch_size: int,
    after_prefill: Callable[[], None] | None = None,
    one_pass: bool = True,
) -> Iterator[Step]:
    """Yield the logits before every reference token of every sample, while the engine is fed the reference.

    Args:
        engine: The engine to drive. No sequence of these samples is left in it.
        encoded: The samples in tokens.
        batch_size: Most sequences in one decode step.
        after_prefill: Called after each prefill, before anything is decoded: the canary corrupts the engine here. In a
            one-pass decode it is called first, so that later chunks of a long prompt see its effect as well.
        one_pass: Whether an engine that can do so computes each sample in one pass. Its logits are those of decoding
            token by token, but for rounding.
    """
    if one_pass and isinstance(engine, OnePassEngine):
        return _decode_in_one_pass(engine, encoded, after_prefill)
    return _decode_in_batches(engine, encoded, _ReferenceTokens(encoded), batch_size, after_prefill)


def _decode_in_one_pass(
    engine: OnePassEngine, encoded: Sequence[EncodedSample], after_prefill: Callable[[], None] | None
) -> Iterator[Step]:
    """Compute all positions of a sample at once and yield them in steps of STEP_ROWS."""
    if after_prefill is not None:
        after_prefill()
    for i, item in enumerate(encoded):
        count = len(item.reference)
        # The last reference token is not fed, because the token after it is not scored.
        logits_BV = engine.forced([*item.prompt, *item.reference[:-1]], len(item.prompt) - 1)
        for first in range(0, count, STEP_ROWS):
            rows = range(first, min(first + STEP_ROWS, count))
            yield Step([i] * len(rows), list(rows), logits_BV[first : rows.stop])


def greedy_decode(
    engine: Engine, encoded: Sequence[EncodedSample], batch_size: int, limits: Sequence[int], stop_token: int
) -> list[list[int]]:
    """Generate the greedy answer to each sample. The first token of an answer is decoded, too, never prefilled.

    Args:
        engine: The engine to drive.
        encoded: The samples in tokens.
        batch_size: Most sequences in one decode step.
        limits: Most tokens of each answer.
        stop_token: Token that ends an answer.

    Returns:
        Token ids of each answer, without the stop token.
    """
    source = _GreedyTokens(limits, stop_token)
    for _ in _decode_in_batches(engine, encoded, source, batch_size):
        pass
    return source.answers
