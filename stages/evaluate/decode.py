"""Driving an engine: forced decode and greedy decode over a continuously refilled batch, or forced decode in one pass.

A prompt's last token is not prefilled but decoded, so that **every** logit, the first one included, was computed by the
decode path from the quantized cache (prefill logits attend over fresh keys and values and say nothing about the cache).

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


@dataclass(frozen=True)
class Step:
    """Decoded tokens: row r of `logits_BV` predicts token `positions[r]` of the answer of sample `samples[r]`."""

    samples: list[int]
    positions: list[int]
    logits_BV: Logits


class _Course(Protocol):
    """What is fed next, and when a sequence has ended."""

    def next_token(self, sample: int, position: int, greedy: int) -> int | None:
        """The token fed after `position` tokens of the answer are known, or None when the sequence is done."""
        ...


class _Forced:
    def __init__(self, encoded: Sequence[EncodedSample]) -> None:
        self.encoded = encoded

    def next_token(self, sample: int, position: int, greedy: int) -> int | None:  # noqa: ARG002
        reference = self.encoded[sample].reference
        return reference[position - 1] if position < len(reference) else None


class _Greedy:
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
class _Live:
    sample: int
    handle: int
    position: int
    feed: int


def _run(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    course: _Course,
    batch_size: int,
    after_prefill: Callable[[], None] | None = None,
) -> Iterator[Step]:
    # similar contexts side by side: a decode step costs as many pages as its longest sequence has
    waiting = deque(sorted(range(len(encoded)), key=lambda i: len(encoded[i].prompt)))
    live: list[_Live] = []
    while waiting or live:
        entering = [waiting.popleft() for _ in range(min(batch_size - len(live), len(waiting)))]
        if entering:
            handles, _ = engine.prefill([encoded[i].prompt[:-1] for i in entering])
            live += [_Live(i, h, 0, encoded[i].prompt[-1]) for i, h in zip(entering, handles, strict=True)]
            if after_prefill is not None:
                after_prefill()
        logits_BV = engine.decode([one.handle for one in live], [one.feed for one in live])
        yield Step([one.sample for one in live], [one.position for one in live], logits_BV)
        greedy = logits_BV.argmax(axis=1)
        staying: list[_Live] = []
        leaving: list[int] = []
        for one, token in zip(live, greedy.tolist(), strict=True):
            one.position += 1
            following = course.next_token(one.sample, one.position, token)
            if following is None:
                leaving.append(one.handle)
            else:
                one.feed = following
                staying.append(one)
        if leaving:
            engine.release(leaving)
        live = staying


def forced_decode(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    batch_size: int,
    after_prefill: Callable[[], None] | None = None,
    one_pass: bool = True,
) -> Iterator[Step]:
    """Yield the logits before every reference token of every sample, the reference being fed token by token.

    An engine that can computes each sample in one pass, unless `one_pass` is false: the same logits but for rounding.
    `after_prefill` runs once sequences were prefilled and before anything is decoded: the canary's moment. Before one
    pass it runs first, so that later chunks of a long prompt see what it did as well.
    """
    if one_pass and isinstance(engine, OnePassEngine):
        return _one_pass(engine, encoded, after_prefill)
    return _run(engine, encoded, _Forced(encoded), batch_size, after_prefill)


def _one_pass(
    engine: OnePassEngine, encoded: Sequence[EncodedSample], after_prefill: Callable[[], None] | None
) -> Iterator[Step]:
    """All positions of a sample at once, handed on in steps of STEP_ROWS."""
    if after_prefill is not None:
        after_prefill()
    for i, item in enumerate(encoded):
        count = len(item.reference)
        # the last reference token is not fed: what would follow it is not scored
        logits_BV = engine.forced([*item.prompt, *item.reference[:-1]], len(item.prompt) - 1)
        for first in range(0, count, STEP_ROWS):  # what follows a step makes several copies of its logits
            rows = range(first, min(first + STEP_ROWS, count))
            yield Step([i] * len(rows), list(rows), logits_BV[first : rows.stop])


def greedy_decode(
    engine: Engine, encoded: Sequence[EncodedSample], batch_size: int, limits: Sequence[int], stop_token: int
) -> list[list[int]]:
    """Greedy answers without the stop token, of at most `limits` tokens each; their first token is decoded, too."""
    course = _Greedy(limits, stop_token)
    for _ in _run(engine, encoded, course, batch_size):
        pass
    return course.answers
