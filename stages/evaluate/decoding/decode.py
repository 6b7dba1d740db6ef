"""Runs forced decode and greedy answers for samples on an engine, in one continuous batch.

The last token of a prompt is decoded instead of prefilled, so that the decode path computes **every** logit, including the
first, from the quantized cache. A prefill attends over fresh keys and values, and its logits do not depend on the cache.

While every reference token is also the most likely token, the greedy answer **equals** the reference. At the first
difference, the sequence is forked: the fork generates the answer freely, and the original continues with the reference.
Without forks, or after a one-pass decode, a second pass generates the differing answers.

Legend: B = sequences in the batch at that step, V = vocab_size.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stages.engines.interface import Engine, Logits, SupportsForced, SupportsFork, SupportsRequests
from stages.evaluate.decoding.stored import SampleResult
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.coverage import Exercised

STEP_ROWS = 64
"""Maximum rows per step of a one-pass forced decode. Limits memory: the consumer of a step copies its logits several times."""

NO_TOKEN = -1
"""Placeholder for the most likely token of a row with non-finite logits. It equals no token id and ends an answer."""


@dataclass(frozen=True, kw_only=True)
class DecodedToken:
    """A reference token that one row of a step predicts."""

    sample: int
    position: int
    """Position in the sample's reference, from 0."""
    greedy: int
    """Most likely token, or NO_TOKEN."""
    sequence: int | None = None
    """Sequence handle, valid until the next step; None in a one-pass decode."""
    row: int | None = None
    """Index in the engine's decode step, which also has sequences that generate freely; None in a one-pass decode."""


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """Logits of one step of forced decode, one row per decoded token."""

    tokens: list[DecodedToken]
    logits_BV: Logits
    size: int = 1
    """Number of sequences in the engine's decode step."""
    request: int | None = None
    """Index of the request among the requests in flight, if the engine serves whole requests."""


@dataclass(frozen=True)
class StoppingCriteria:
    """Conditions that end a greedy answer: a stop token or the maximum length."""

    stop_tokens: tuple[int, ...]
    """Tokens that end an answer; references end with the first stop token."""
    extra_tokens: int
    """Maximum tokens of an answer beyond the length of its reference."""

    def add(self, answer: list[int], token: int, item: EncodedSample) -> bool:
        """Append the next token to an answer; return whether the answer has ended."""
        if token == NO_TOKEN:
            return True
        answer.append(token)
        return token in self.stop_tokens or len(answer) >= self.limit(item)

    def limit(self, item: EncodedSample) -> int:
        """Return the maximum number of tokens in an answer to a sample."""
        return item.answer_tokens + self.extra_tokens

    def longest(self, item: EncodedSample) -> int:
        """Return the maximum number of tokens in a sequence of this sample: prompt plus reference or answer."""
        return len(item.prompt) + max(len(item.reference), self.limit(item))

    def without_stop(self, answer: Sequence[int]) -> list[int]:
        return list(answer[:-1] if answer and answer[-1] in self.stop_tokens else answer)

    def with_stop(self, answer: Sequence[int], item: EncodedSample) -> list[int]:
        """Return all tokens of a finished answer. Append the first stop token if the engine did not return a stop token."""
        complete = len(answer) >= self.limit(item) or self.without_stop(answer) != list(answer)
        return list(answer) if complete else [*answer, self.stop_tokens[0]]


def greedy_tokens(logits_BV: Logits) -> list[int]:
    """Return the most likely token per row, or NO_TOKEN if the row has a non-finite logit."""
    finite = np.isfinite(logits_BV.min(axis=1)) & np.isfinite(logits_BV.max(axis=1))  # both propagate NaN
    tokens: list[int] = np.where(finite, logits_BV.argmax(axis=1), NO_TOKEN).tolist()
    return tokens


def decode(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    batch_size: int,
    stopping: StoppingCriteria | None = None,
    *,
    chosen: Sequence[int] | None = None,
    after_prefill: Callable[[], None] | None = None,
    one_pass: bool = True,
) -> Iterator[DecodeStep | SampleResult]:
    """Yield the logits that predict each reference token, and each sample once it has finished.

    All sequences are released at the end, also if the caller closes the generator early.

    Args:
        stopping: End conditions of the answers to judged samples; None if no answers are wanted.
        chosen: Indices of the samples to run; None for all.
        after_prefill: Called between a prefill and the next decode step: the must-fail control corrupts the engine here.
            A one-pass decode calls it once, before its first sample. The corruption then also affects the reads of later
            chunks of a long prompt.
        one_pass: Whether to compute each sample in one pass if the engine can. The logits equal the logits of token-by-token
            decoding up to rounding.
    """
    indices = range(len(encoded)) if chosen is None else chosen
    if one_pass and isinstance(engine, SupportsRequests | SupportsForced):
        events = _decode_in_one_pass(engine, encoded, indices, batch_size, after_prefill)
    elif _has_room(engine, batch_size):
        return Batch(engine, encoded, batch_size, stopping, after_prefill, can_fork=True).run(indices)
    else:
        events = Batch(engine, encoded, batch_size, None, after_prefill).run(indices)
    return events if stopping is None else _add_answers(events, engine, encoded, batch_size, stopping)


def shares(engine: Engine, batch_size: int) -> bool:
    """Return whether `decode` prefills a prefix once for all samples that share it."""
    return not isinstance(engine, SupportsForced) and _has_room(engine, batch_size)


def _has_room(engine: Engine, batch_size: int) -> bool:
    """Return whether the engine can fork and has room for a full batch, a fork per sequence, and a shared prefix."""
    return isinstance(engine, SupportsFork) and (engine.max_sequences is None or engine.max_sequences > 2 * batch_size)


def _decode_in_one_pass(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    indices: Sequence[int],
    batch_size: int,
    after_prefill: Callable[[], None] | None,
) -> Iterator[DecodeStep | SampleResult]:
    """Compute all positions of a sample in one pass, or of `batch_size` samples if the engine serves whole requests."""
    if after_prefill is not None:
        after_prefill()
    in_requests = isinstance(engine, SupportsRequests)
    size = batch_size if in_requests else 1
    indices = sort_by_length(encoded, indices) if in_requests else indices
    for begin in range(0, len(indices), size):
        group = indices[begin : begin + size]
        items = [encoded[i] for i in group]
        requests = [([*item.prompt, *item.reference[:-1]], len(item.prompt) - 1) for item in items]
        if isinstance(engine, SupportsRequests):
            logits = engine.forced_together(requests)
        else:
            assert isinstance(engine, SupportsForced)
            logits = [engine.forced(*requests[0])]
        for number, (i, item, logits_BV) in enumerate(zip(group, items, logits, strict=True)):
            yield from _steps_of_sample(i, logits_BV[: len(item.reference)], request=number if in_requests else None)
            trace = Exercised()
            if in_requests:
                # The library may compute fewer requests together than it receives.
                together = min(len(group), engine.max_batch or len(group))
                trace.note_step(len(item.prompt), len(item.reference) - 1, together)
            yield SampleResult(sample=i, answer=None, trace=trace)


def _steps_of_sample(sample: int, logits_BV: Logits, request: int | None) -> Iterator[DecodeStep]:
    """Yield the logits of all positions of a sample in steps of at most STEP_ROWS rows."""
    for first in range(0, len(logits_BV), STEP_ROWS):
        part = logits_BV[first : first + STEP_ROWS]
        tokens = [
            DecodedToken(sample=sample, position=position, greedy=token)
            for position, token in enumerate(greedy_tokens(part), start=first)
        ]
        yield DecodeStep(tokens=tokens, logits_BV=part, request=request)


def _add_answers(
    events: Iterator[DecodeStep | SampleResult],
    engine: Engine,
    encoded: Sequence[EncodedSample],
    batch_size: int,
    stopping: StoppingCriteria,
) -> Iterator[DecodeStep | SampleResult]:
    deviating: set[int] = set()
    forced: dict[int, SampleResult] = {}
    for event in events:
        if isinstance(event, DecodeStep):
            deviating |= {
                token.sample for token in event.tokens if token.greedy != encoded[token.sample].reference[token.position]
            }
            yield event
        elif not encoded[event.sample].sample.judged:
            yield event
        elif event.sample in deviating:
            forced[event.sample] = event
        else:
            yield replace(event, answer=encoded[event.sample].reference)
    for event in Batch(engine, encoded, batch_size, stopping, free=True).run(list(forced)):
        if isinstance(event, SampleResult):
            yield replace(event, trace=Exercised.merged([forced[event.sample].trace, event.trace]))


@dataclass
class _RunningSample:
    """A sample with live sequences."""

    index: int
    item: EncodedSample
    answer: list[int] | None = None
    """Tokens of the answer; None as long as it equals the reference."""
    sequences: int = 1
    """Number of live sequences: the sample's own, and a fork that generates the answer."""
    trace: Exercised = field(default_factory=Exercised)


@dataclass
class _SampleSequence:
    """A live sequence of a sample."""

    sample: _RunningSample
    handle: int
    input_token: int
    position: int = 0
    """Position of the token that the next step predicts."""
    free: bool = False
    """Whether the sequence generates the answer; otherwise it is fed the reference."""


@dataclass
class Batch:
    """Sequences that are decoded together. When a sequence ends, the next sample takes its place at once.

    A batch that `can_fork` prefills a shared document once, and forks a sequence whose output deviates from the reference, so
    that the fork generates the answer. A batch that is `free` generates all answers from the prompts, without references.
    """

    engine: Engine
    encoded: Sequence[EncodedSample]
    batch_size: int
    stopping: StoppingCriteria | None
    after_prefill: Callable[[], None] | None = None
    can_fork: bool = field(default=False, kw_only=True)
    free: bool = field(default=False, kw_only=True)
    queue: deque[int] = field(default_factory=deque, init=False)
    live: list[_SampleSequence] = field(default_factory=list, init=False)
    forks: deque[_SampleSequence] = field(default_factory=deque, init=False)
    """Forks waiting for a place in the batch."""
    prefixes: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict, init=False)
    """Sequence handles of the prefixes that queued samples need."""
    users: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter, init=False)
    """Number of queued samples by prefix."""

    def run(self, indices: Sequence[int]) -> Iterator[DecodeStep | SampleResult]:
        """Decode the samples with these indices. Yield the steps of forced decode, and each sample once it has finished."""
        self.queue = deque(sort_by_length(self.encoded, indices))
        self.users = Counter(self.encoded[i].prefix for i in indices if self.encoded[i].shared)
        try:
            yield from self._steps()
        except GeneratorExit:
            self.engine.release([*(sequence.handle for sequence in (*self.live, *self.forks)), *self.prefixes.values()])
            raise

    def _steps(self) -> Iterator[DecodeStep | SampleResult]:
        while self.queue or self.live or self.forks:
            self._fill()
            logits_BV = self.engine.decode([s.handle for s in self.live], [s.input_token for s in self.live])
            for s in self.live:
                s.sample.trace.note_step(len(s.sample.item.prompt), s.position, len(self.live))
            greedy = greedy_tokens(logits_BV)
            tokens = [
                DecodedToken(sample=s.sample.index, position=s.position, greedy=greedy[row], sequence=s.handle, row=row)
                for row, s in enumerate(self.live)
                if not s.free
            ]
            if tokens:
                is_forced = [not s.free for s in self.live]
                forced_BV = logits_BV if all(is_forced) else logits_BV[is_forced]
                yield DecodeStep(tokens=tokens, logits_BV=forced_BV, size=len(self.live))
            yield from self._advance(greedy)

    def _fill(self) -> None:
        while self.forks and len(self.live) < self.batch_size:
            self.live.append(self.forks.popleft())
        admitted = [self.queue.popleft() for _ in range(min(self.batch_size - len(self.live), len(self.queue)))]
        if not admitted:
            return
        alone = [i for i in admitted if not (self.can_fork and self.encoded[i].shared)]
        handles = dict(zip(alone, self.engine.prefill([self.encoded[i].prompt[:-1] for i in alone])[0], strict=True))
        for i in admitted:
            sample = _RunningSample(i, self.encoded[i], answer=[] if self.free else None)
            handle = handles[i] if i in handles else self._fork_prefix(sample)
            self.live.append(_SampleSequence(sample, handle, sample.item.prompt[-1], free=self.free))
        if self.after_prefill is not None:
            self.after_prefill()

    def _fork_prefix(self, sample: _RunningSample) -> int:
        """Return a sequence that holds the sample's prompt except its last token, forked from the shared prefix."""
        item = sample.item
        if item.prefix not in self.prefixes:
            (self.prefixes[item.prefix],), _ = self.engine.prefill([item.prompt[: item.shared]])
        assert isinstance(self.engine, SupportsFork)
        handle = self.engine.fork(self.prefixes[item.prefix])
        self.users[item.prefix] -= 1
        if not self.users[item.prefix]:
            self.engine.release([self.prefixes.pop(item.prefix)])
        question = item.prompt[item.shared : -1]
        if question:
            self.engine.extend(handle, question)
        sample.trace.forks += 1
        return handle

    def _advance(self, tokens: Sequence[int]) -> Iterator[SampleResult]:
        unfinished: list[_SampleSequence] = []
        ended: list[_SampleSequence] = []
        for sequence, token in zip(self.live, tokens, strict=True):
            continues = self._feed_answer(sequence, token) if sequence.free else self._feed_reference(sequence, token)
            sequence.position += 1
            (unfinished if continues else ended).append(sequence)
        if ended:
            self.engine.release([sequence.handle for sequence in ended])
        self.live = unfinished
        for sequence in ended:
            sequence.sample.sequences -= 1
            if not sequence.sample.sequences:
                yield self._finish(sequence.sample)

    def _feed_reference(self, sequence: _SampleSequence, token: int) -> bool:
        """Feed the next reference token; return whether the sequence continues. Fork it at its first deviation."""
        sample = sequence.sample
        item = sample.item
        expected = sequence.input_token = item.reference[sequence.position]
        continues = sequence.position + 1 < len(item.reference)
        deviates = token != expected and sample.answer is None
        if not self.can_fork or self.stopping is None or not item.sample.judged or not deviates:
            return continues
        sample.answer = list(item.reference[: sequence.position])
        if self.stopping.add(sample.answer, token, item):
            return continues
        if not continues:  # nothing is left to score, so the sequence itself generates freely
            sequence.free = True
            sequence.input_token = token
            return True
        assert isinstance(self.engine, SupportsFork)
        fork = self.engine.fork(sequence.handle)
        sample.trace.forks += 1
        sample.sequences += 1
        self.forks.append(_SampleSequence(sample, fork, token, sequence.position + 1, free=True))
        return True

    def _feed_answer(self, sequence: _SampleSequence, token: int) -> bool:
        assert self.stopping is not None
        assert sequence.sample.answer is not None
        sequence.input_token = token
        return not self.stopping.add(sequence.sample.answer, token, sequence.sample.item)

    def _finish(self, sample: _RunningSample) -> SampleResult:
        answer = None
        if self.stopping is not None and sample.item.sample.judged:
            answer = sample.item.reference if sample.answer is None else tuple(sample.answer)
        return SampleResult(sample=sample.index, answer=answer, trace=sample.trace)


def sort_by_length(encoded: Sequence[EncodedSample], indices: Sequence[int]) -> list[int]:
    """Sort samples by prompt length, and keep samples with the same prefix together.

    The longest sequence determines the cost of a decode step, so sequences in a batch should have similar lengths.
    """
    longest: dict[tuple[str, tuple[int, ...]], int] = {}
    for i in indices:
        if encoded[i].shared:
            longest[encoded[i].prefix] = max(longest.get(encoded[i].prefix, 0), len(encoded[i].prompt))
    places = {prefix: place for place, prefix in enumerate(longest)}

    def order(i: int) -> tuple[int, int, int]:
        item = encoded[i]
        if not item.shared:
            return len(item.prompt), -1, len(item.prompt)
        return longest[item.prefix], places[item.prefix], len(item.prompt)

    return sorted(indices, key=order)
