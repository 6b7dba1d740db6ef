"""The continuously refilled batch: sequences that are fed their references, and sequences that run free to an answer.

Legend: B = sequences in the batch at that step, V = vocab_size.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.engine import Engine
from pipeline.verdict.coverage import Exercised
from stages.evaluate.inputs.tokens import EncodedSample

Logits = npt.NDArray[np.float32]

NOT_FINITE = -1
"""The most likely token where logits are not finite. It equals no token, and ends an answer."""


@dataclass(frozen=True)
class Step:
    """The logits of one step of forced decode, a row for each decoded token."""

    samples: list[int]
    """Index of each row's sample."""
    positions: list[int]
    """Position in the sample's reference, from 0, of the token that each row predicts."""
    greedy: list[int]
    """Most likely token of each row, NOT_FINITE where there is none."""
    logits_BV: Logits
    sequences: list[int] | None = None
    """The sequence of each row, which is live until the next step is asked for; None in a one-pass decode."""
    rows: list[int] | None = None
    """The row of each in the engine's decode step, among sequences that run free; None in a one-pass decode."""
    size: int = 1
    """Sequences of that decode step."""
    request: int | None = None
    """The number of the request among those that were in flight with it, on an engine of requests."""


@dataclass(frozen=True)
class Finished:
    """A sample of which nothing is running any more."""

    sample: int
    answer: tuple[int, ...] | None
    """The greedy answer with the stop token that ended it; None when no answer was asked for."""
    trace: Exercised
    """What it took the engine through."""


@dataclass(frozen=True)
class Greedy:
    """How answers end."""

    stop_tokens: tuple[int, ...]
    """Tokens that end an answer; the first one ends references."""
    extra_tokens: int
    """An answer may be this much longer than its reference."""

    def add(self, answer: list[int], token: int, item: EncodedSample) -> bool:
        """Append the next token to an answer; return whether the answer has ended."""
        if token == NOT_FINITE:
            return True
        answer.append(token)
        return token in self.stop_tokens or len(answer) >= self.limit(item)

    def limit(self, item: EncodedSample) -> int:
        """Return the most tokens of an answer to a sample."""
        return item.asked + self.extra_tokens

    def longest(self, item: EncodedSample) -> int:
        """Return the most tokens of a sequence that a sample's reference or answer makes."""
        return len(item.prompt) + max(len(item.reference), self.limit(item))

    def words(self, answer: Sequence[int]) -> list[int]:
        """Return an answer without the stop token that ended it."""
        return list(answer[:-1] if answer and answer[-1] in self.stop_tokens else answer)

    def said(self, answer: Sequence[int], item: EncodedSample) -> list[int]:
        """Return all tokens of a finished answer: with a stop token if the engine did not show which one ended it."""
        cut = len(answer) >= self.limit(item) or self.words(answer) != list(answer)
        return list(answer) if cut else [*answer, self.stop_tokens[0]]


def most_likely(logits_BV: Logits) -> list[int]:
    """Return the most likely token of each row, NOT_FINITE where a logit is not finite."""
    finite = np.isfinite(logits_BV.min(axis=1)) & np.isfinite(logits_BV.max(axis=1))  # both propagate NaN
    tokens: list[int] = np.where(finite, logits_BV.argmax(axis=1), NOT_FINITE).tolist()
    return tokens


@dataclass
class _Sequence:
    sample: int
    """Index of its sample."""
    handle: int
    input_token: int
    """Token that the next decode step is fed."""
    position: int = 0
    """Position of the token that the next step predicts."""
    answer: list[int] | None = None
    """The answer so far of a sequence that runs free; None while it is fed the reference."""


class Batch:
    """Sequences that are decoded together; a finished one makes room for the next sample at once."""

    def __init__(
        self,
        engine: Engine,
        encoded: Sequence[EncodedSample],
        batch_size: int,
        greedy: Greedy | None,
        after_prefill: Callable[[], None] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engine, self.encoded, self.batch_size, self.greedy = engine, encoded, batch_size, greedy
        self.after_prefill, self.stopping = after_prefill, stopping
        self.queue: deque[int] = deque()
        self.live: list[_Sequence] = []
        self.forks: deque[_Sequence] = deque()
        """Forks that wait for a place in the batch."""
        self.answers: dict[int, list[int]] = {}
        """Answers that deviate from the reference, by sample in flight."""
        self.running: Counter[int] = Counter()
        """Sequences of each sample in flight."""
        self.traces: defaultdict[int, Exercised] = defaultdict(Exercised)

    def run(self, indices: Sequence[int]) -> Iterator[Step | Finished]:
        self.queue = deque(in_order(self.encoded, indices))
        while self.queue or self.live or self.forks:
            if self.stopping():
                self.queue.clear()
            self._fill()
            if not self.live:
                return
            logits_BV = self.engine.decode([s.handle for s in self.live], [s.input_token for s in self.live])
            for s in self.live:
                self.traces[s.sample].step(len(self.encoded[s.sample].prompt), s.position, len(self.live))
            tokens = most_likely(logits_BV)
            forced = [row for row, s in enumerate(self.live) if s.answer is None]
            if forced:
                rows = [self.live[row] for row in forced]
                yield Step(
                    [s.sample for s in rows],
                    [s.position for s in rows],
                    [tokens[row] for row in forced],
                    logits_BV if len(forced) == len(self.live) else logits_BV[forced],
                    [s.handle for s in rows],
                    forced,
                    len(self.live),
                )
            yield from self._advance(tokens)

    def _fill(self) -> None:
        """Let waiting forks into the batch, and then the next samples."""
        while self.forks and len(self.live) < self.batch_size:
            self.live.append(self.forks.popleft())
        admitted = [self.queue.popleft() for _ in range(min(self.batch_size - len(self.live), len(self.queue)))]
        if not admitted:
            return
        for i, handle in zip(admitted, self._prefill(admitted), strict=True):
            self.live.append(self._sequence(i, handle))
            self.running[i] = 1
        if self.after_prefill is not None:
            self.after_prefill()

    def _prefill(self, admitted: Sequence[int]) -> list[int]:
        """Prefill all but the last token of each sample's prompt; return the sequences."""
        return self.engine.begin([self.encoded[i].prompt[:-1] for i in admitted])

    def _sequence(self, sample: int, handle: int) -> _Sequence:
        """Return a sample's first sequence."""
        return _Sequence(sample, handle, self.encoded[sample].prompt[-1])

    def _advance(self, tokens: Sequence[int]) -> Iterator[Finished]:
        """Give each sequence its next input; release those that have ended, and yield the samples that have finished."""
        unfinished: list[_Sequence] = []
        ended: list[_Sequence] = []
        for sequence, token in zip(self.live, tokens, strict=True):
            goes_on = self._feed_reference(sequence, token) if sequence.answer is None else self._feed_answer(sequence, token)
            sequence.position += 1
            (unfinished if goes_on else ended).append(sequence)
        if ended:
            self.engine.release([sequence.handle for sequence in ended])
        self.live = unfinished
        for sequence in ended:
            self.running[sequence.sample] -= 1
            if not self.running[sequence.sample]:
                yield self._finish(sequence.sample)

    def _feed_reference(self, sequence: _Sequence, token: int) -> bool:  # noqa: ARG002  (forks need the token)
        """Feed the reference's next token; return whether there is another one to score after it."""
        reference = self.encoded[sequence.sample].reference
        sequence.input_token = reference[sequence.position]
        return sequence.position + 1 < len(reference)

    def _feed_answer(self, sequence: _Sequence, token: int) -> bool:
        """Feed the most likely token; return whether the answer goes on."""
        assert self.greedy is not None
        assert sequence.answer is not None
        sequence.input_token = token
        return not self.greedy.add(sequence.answer, token, self.encoded[sequence.sample])

    def _finish(self, sample: int) -> Finished:
        del self.running[sample]
        item, answer = self.encoded[sample], None
        if self.greedy is not None and item.judged:
            own = self.answers.pop(sample, None)
            answer = item.reference if own is None else tuple(own)
        return Finished(sample, answer, self.traces.pop(sample))


class FreeBatch(Batch):
    """Generates the answers of samples from their prompts on."""

    def _sequence(self, sample: int, handle: int) -> _Sequence:
        self.answers[sample] = []
        return _Sequence(sample, handle, self.encoded[sample].prompt[-1], answer=self.answers[sample])


class SharingBatch(Batch):
    """Prefills what samples of a document share once, and forks a sequence where it leaves the reference."""

    def run(self, indices: Sequence[int]) -> Iterator[Step | Finished]:
        self.users = Counter(self.encoded[i].prefix for i in indices if self.encoded[i].shared)
        """Samples still to be admitted, by prefix."""
        self.prefixes: dict[tuple[str, tuple[int, ...]], int] = {}
        """Sequences that hold a prefix for samples still to be admitted."""
        yield from super().run(indices)
        self.engine.release(list(self.prefixes.values()))

    def _prefill(self, admitted: Sequence[int]) -> list[int]:
        alone = [i for i in admitted if not self.encoded[i].shared]
        handles = dict(zip(alone, super()._prefill(alone), strict=True))
        handles |= {i: self._continued(i) for i in admitted if i not in handles}
        return [handles[i] for i in admitted]

    def _continued(self, sample: int) -> int:
        """Return a sequence that continues the sample's prefix to all but the last token of its prompt."""
        item = self.encoded[sample]
        if item.prefix not in self.prefixes:
            (self.prefixes[item.prefix],), _ = self.engine.prefill([item.prompt[: item.shared]])
        handle = self.engine.fork(self.prefixes[item.prefix])
        self.users[item.prefix] -= 1
        if not self.users[item.prefix]:
            self.engine.release([self.prefixes.pop(item.prefix)])
        rest = item.prompt[item.shared : -1]
        if rest:
            self.engine.extend(handle, rest)
        self.traces[sample].shared_prefixes = 1
        return handle

    def _feed_reference(self, sequence: _Sequence, token: int) -> bool:
        item = self.encoded[sequence.sample]
        goes_on = super()._feed_reference(sequence, token)
        deviates = token != item.reference[sequence.position] and sequence.sample not in self.answers
        if self.greedy is None or not item.judged or not deviates:
            return goes_on
        answer = self.answers[sequence.sample] = list(item.reference[: sequence.position])
        if self.greedy.add(answer, token, item):
            return goes_on
        if not goes_on:  # nothing is left to score, so that the sequence itself runs free
            sequence.answer, sequence.input_token = answer, token
            return True
        fork = self.engine.fork(sequence.handle)
        self.traces[sequence.sample].forks += 1
        self.forks.append(_Sequence(sequence.sample, fork, token, sequence.position + 1, answer))
        self.running[sequence.sample] += 1
        return True


def in_order(encoded: Sequence[EncodedSample], indices: Sequence[int]) -> list[int]:
    """Order samples so that similar contexts run side by side, and the samples of one prefix one after the other.

    A decode step costs as many pages as its longest sequence has.
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
