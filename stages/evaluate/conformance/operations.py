"""The operations of the stress test.

The engine runs first, and the codes of a sequence are recorded before the engine frees them. At the end of a scenario, the
reference engine replays all its sequences together over the recorded codes.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from stages.core.records import Progress, no_progress
from stages.engines.interface import Logits, SupportsFork, SupportsRequests
from stages.evaluate.conformance.answers import AnswerChecks
from stages.evaluate.conformance.comparer import SequenceComparer
from stages.evaluate.conformance.deviations import Deviations
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.evaluate.decoding.system import wrong_allocation
from stages.policies.policy import PAGE_TOKENS
from stages.workloads.config import StressTestConfig

BEGINNING = 4
"""Number of first tokens that group sequences with a common beginning."""

COMMON = 1 / 4
"""Share of a batch's rows that decode the same token, like requests with equal words."""

LONG_ANSWER = 3 * PAGE_TOKENS
"""Minimum decoded tokens after which `finish` extends a sequence by a turn."""
TURN = 4
"""Maximum tokens of the turn; number of tokens decoded after it."""

RESTING_TURN = 5
"""Maximum tokens in a turn of a resting sequence."""


T = TypeVar("T")


@dataclass
class StressTest:
    """State of a run over all scenarios."""

    comparer: SequenceComparer
    config: StressTestConfig
    max_tokens: int
    largest: int
    """Number of sequences in the largest batch."""
    claimed: int
    """Number of tokens in the longest sample."""
    seed: int = 0
    share: float = 1.0
    """Share of the test that runs, see `StressTestConfig.share`."""
    texts: Sequence[Sequence[int]] = ()
    """Prompts of the questions, from which `quote` draws."""
    progress: Progress = no_progress
    """Called with the tokens that the engine or the reference engine computed, and their approximate total."""
    scenario: str = ""
    failures: list[str] = field(default_factory=list)
    """Messages about wrong answers, refused scenarios, and influence between requests."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts and maxima of the run, by field of `StressResult`."""
    computed: int = 0
    """Tokens that the engine was fed or generated, and tokens that the reference engine replayed."""
    unreplayed: int = 0
    """Tokens of watched sequences that the reference engine has not replayed yet."""
    resting: list[ForcedSequence] = field(default_factory=list)
    """The sequences that stay live during all scenarios, see `wake`."""
    offsets: set[int] = field(default_factory=set)
    prompt_offsets: set[int] = field(default_factory=set)
    """Lengths of prompts modulo the page size."""
    allocation: str | None = None
    """`wrong_allocation` after the first decode step."""
    live: list[ForcedSequence] = field(default_factory=list)
    ended: list[ForcedSequence] = field(default_factory=list)
    """Released sequences that are not compared yet."""

    def __post_init__(self) -> None:
        self.engine, self.deviations = self.comparer.engine, Deviations(self.comparer)
        self.answers = AnswerChecks(self.comparer, self.failures)
        self.special = self.comparer.reference.special_tokens
        self.rng = np.random.default_rng(self.seed)
        self.expected = self.config.tokens(self.max_tokens, self.claimed, self.largest, self.share)

    def _advance(self, tokens: int) -> None:
        self.computed += tokens
        self.progress("stress test [tokens]", self.computed, max(self.expected, self.computed))

    def _reach(self, **maxima: int) -> None:
        self.counts |= Counter(maxima)  # the union keeps the larger values

    # --- operations -------------------------------------------------------------------------------------------------

    def scaled(self, count: int) -> int:
        """Return the share of `count` that runs, rounded up."""
        return math.ceil(self.share * count)

    def draw(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, self.engine.vocab_size, count).tolist()
        return tokens

    def quote(self, count: int) -> list[int]:
        """Draw consecutive tokens of a question, or random tokens if no question is as long.

        A prompt of random tokens tests little: its answer soon repeats one token, even if the cache is wrong.
        """
        texts = [text for text in self.texts if len(text) >= count]
        if not texts:
            return self.draw(count)
        text = self.pick(texts)
        begin = self.randint(0, len(text) - count)
        return list(text[begin : begin + count])

    def text(self, count: int) -> list[int]:
        """Draw random tokens, sometimes with special tokens at the ends or a repeated block."""
        tokens, block = self.draw(count), 16 << self.randint(0, 2)
        for place in (0, -1):
            if self.special and self.rng.random() < 1 / 4:
                tokens[place] = self.pick(self.special)
        if count >= 2 * block and self.rng.random() < 1 / 4:
            end = block * self.randint(2, count // block)
            tokens[end - block : end] = tokens[end - 2 * block : end - block]
        return tokens

    def randint(self, least: int, most: int) -> int:
        """Draw a number from `least` to `most`, inclusive."""
        return int(self.rng.integers(least, most + 1))

    def pick(self, items: Sequence[T]) -> T:
        return items[self.randint(0, len(items) - 1)]

    def sequence(self, role: str, prompt: int | Sequence[int], steps: int = 0) -> ForcedSequence:
        """Return a new sequence. `prompt`: tokens, or a number of random tokens; `steps`: number of random tokens to decode."""
        tokens = self.text(prompt) if isinstance(prompt, int) else list(prompt)
        return ForcedSequence(role, tokens, self.draw(steps))

    def prefill(self, *sequences: ForcedSequence) -> None:
        handles, logits = self.engine.prefill([sequence.prompt for sequence in sequences])
        self._advance(sum(len(sequence.prompt) for sequence in sequences))
        self.counts["requests"] += len(sequences)
        for row, (sequence, handle) in enumerate(zip(sequences, handles, strict=True)):
            sequence.handle = handle
            self._take(sequence, sequence.prompt, logits[row], row, len(sequences), decoded=False)
        self.live += sequences
        self._observe(sequences if self.comparer.frees_pages else ())

    def _take(
        self, sequence: ForcedSequence, tokens: Sequence[int], logits_V: Logits, row: int, batch: int, *, decoded: bool
    ) -> None:
        """Record fed tokens and the logits of the last token, computed in row `row` of a batch of size `batch`."""
        sequence.feed(tokens, logits_V, (row, batch), decoded=decoded)
        if sequence.watched:
            self.unreplayed += len(tokens)
            self.counts["rows"] += 1
            self._reach(tokens=len(sequence.tokens))
            if tokens is sequence.prompt:
                self.prompt_offsets.add(len(tokens) % PAGE_TOKENS)
            if decoded:
                self._reach(decoded=sequence.decoded, batch=batch)
                self.offsets.add((len(sequence.tokens) - 1) % PAGE_TOKENS)

    def decode(self, *sequences: ForcedSequence, steps: int = 1) -> None:
        for _ in range(steps):
            common, fresh = self.draw(1)[0], self.draw(len(sequences))
            drawn = np.where(self.rng.random(len(sequences)) < COMMON, common, fresh).tolist()
            tokens = [s.ahead.pop(0) if s.ahead else token for s, token in zip(sequences, drawn, strict=True)]
            logits = self.engine.decode([sequence.handle for sequence in sequences], tokens)
            self._advance(len(tokens))
            for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
                self._take(sequence, [token], logits[row], row, len(sequences), decoded=True)
            self._observe([sequence for sequence in sequences if self.comparer.frees_next(sequence)])
            if self.allocation is None:
                self.allocation = wrong_allocation(self.engine)

    def extend(self, sequence: ForcedSequence, chunk: int | Sequence[int]) -> None:
        """Append a chunk: tokens, or a number of random tokens."""
        tokens = self.text(chunk) if isinstance(chunk, int) else chunk
        observed = [sequence] if self.comparer.frees_pages else []
        self._observe(observed)
        assert isinstance(self.engine, SupportsFork)
        logits_V = self.engine.extend(sequence.handle, tokens)
        self._advance(len(tokens))
        self.counts["turns"] += sequence.decoded > 0
        self._take(sequence, tokens, logits_V, 0, 1, decoded=False)
        self._observe(observed)

    def wake(self) -> None:
        """Advance the resting sequences: the first by a short turn if possible, the others by a token."""
        for sequence in self.resting:
            if sequence is self.resting[0] and isinstance(self.engine, SupportsFork):
                self.extend(sequence, self.randint(1, RESTING_TURN))
            else:
                self.decode(sequence)

    def fork(self, sequence: ForcedSequence, role: str, steps: int = 0) -> ForcedSequence:
        assert isinstance(self.engine, SupportsFork)
        ahead = self.draw(steps)
        branch = sequence.branch(role, self.engine.fork(sequence.handle), ahead)
        self.counts["forks"] += 1
        self.counts["requests"] += 1
        self.live.append(branch)
        return branch

    def ask(
        self, sequences: Sequence[ForcedSequence], limits: Sequence[int], stops: Sequence[int] = (), at_once: int | None = None
    ) -> list[list[int]]:
        """Generate and return free answers. Their tokens are checked at the end of the scenario."""
        at_once = at_once or self.largest
        prompts = [sequence.prompt for sequence in sequences]
        answers = self.engine.generate(prompts, limits, stops, max_sequences=at_once, ended=self.answers.observe)
        self.counts["requests"] += len(sequences)
        self._advance(sum(len(sequence.prompt) for sequence in sequences) + sum(map(len, answers)))
        for sequence, answer, limit in zip(sequences, answers, limits, strict=True):
            self.answers.take(sequence, answer, limit, stops)
        return [list(answer) for answer in answers]

    def release(self, *sequences: ForcedSequence) -> None:
        self._observe(sequences)
        self.engine.release([sequence.handle for sequence in sequences])
        self._end(sequences)

    def _end(self, sequences: Sequence[ForcedSequence]) -> None:
        for sequence in sequences:
            sequence.handle = -1
            self.live.remove(sequence)
            if sequence.watched:
                sequence.name = f"{self.scenario}: {sequence.name}"
                self.ended.append(sequence)

    def _observe(self, sequences: Sequence[ForcedSequence]) -> None:
        """Record the stored codes of sequences. Call it before a release, and before a token that may free pages."""
        for sequence in sequences:
            if sequence.watched:
                self.comparer.observe(sequence, sequence.handle)

    def serve(self, sequences: Sequence[ForcedSequence]) -> None:
        """Prefill sequences together and decode them to their ends. The first sequence decodes a step in a batch of one."""
        self.prefill(*sequences)
        if isinstance(self.engine, SupportsRequests):
            self._serve_requests(sequences)
        else:
            self.decode(sequences[0])
            self.finish(sequences)

    def finish(self, sequences: Sequence[ForcedSequence]) -> None:
        """Decode sequences together, and release each sequence when it ends.

        A sequence that decodes at least LONG_ANSWER tokens gets another turn before its end, if the engine supports turns.
        """
        running = list(sequences)
        while running:
            if len(running) == self.largest:
                self._reach_together([len(sequence.tokens) + 1 for sequence in running])
            self.decode(*running)
            for sequence in running if isinstance(self.engine, SupportsFork) else ():
                room = self.max_tokens - len(sequence.tokens)
                if not sequence.ahead and sequence.pieces[-1][0] >= LONG_ANSWER and room >= 2 * TURN:
                    self.extend(sequence, self.randint(1, TURN))
                    sequence.ahead = self.draw(TURN)
            if not any(sequence.ahead for sequence in running):
                self._check_pages(running)
            self.release(*(sequence for sequence in running if not sequence.ahead))
            running = [sequence for sequence in running if sequence.ahead]

    def _reach_together(self, lengths: list[int]) -> None:
        """Record the second longest of the lengths in a full batch."""
        self._reach(together=sorted(lengths)[-2:][0])

    def _check_pages(self, live: Sequence[ForcedSequence]) -> None:
        """Report pages that the policy should have freed. Call it while only `live` and the resting sequences are live."""
        policy, shape = self.engine.policy, self.engine.shape
        lengths = [len(sequence.tokens) for sequence in (*live, *self.resting)]
        due = sum(policy.kept_pages(length, shape) + policy.window_pages(length) for length in lengths)
        held = self.engine.memory().held_pages
        if held > due + len(lengths):  # a page may be freed a step later
            self.failures.append(
                f"sequences of {', '.join(map(str, lengths))} tokens hold {held} pages, the policy claims {due}"
            )

    def _serve_requests(self, sequences: Sequence[ForcedSequence]) -> None:
        """Release prefilled sequences and decode them as whole requests, on an engine that only serves whole requests."""
        assert isinstance(self.engine, SupportsRequests)
        self.engine.release([sequence.handle for sequence in sequences])
        answers = self.engine.forced_together(
            [([*sequence.prompt, *sequence.ahead], len(sequence.prompt)) for sequence in sequences]
        )
        for row, (sequence, logits) in enumerate(zip(sequences, answers, strict=True)):
            for token, logits_V in zip(sequence.ahead, logits, strict=True):
                self._take(sequence, [token], logits_V, row, len(sequences), decoded=True)
            sequence.ahead = []
            if sequence.watched:
                self.comparer.observe_request(sequence, row)
        self._end(sequences)
        if len(sequences) == self.largest:
            self._reach_together([len(sequence.tokens) for sequence in sequences])

    # --- comparison with the reference engine -------------------------------------------------------------------------

    def end(self) -> None:
        """End a scenario: release the sequences that a refusal left live, compare all sequences, and check the free answers."""
        self.release(*[sequence for sequence in self.live if sequence.handle >= 0 and sequence not in self.resting])
        unforced = self.answers.check_forced()
        self.compare()
        self.ended = self.answers.check(unforced, self._force, self._advance) + self.ended
        self.compare()

    def _force(self, sequence: ForcedSequence) -> None:
        if isinstance(self.engine, SupportsRequests) and sequence.ahead:
            self.serve([sequence])
        else:
            self.prefill(sequence)
            self.decode(sequence, steps=len(sequence.ahead))
            self.release(sequence)

    def compare(self, least: int = 0) -> None:
        """Compare ended sequences with the reference engine, if they have at least `least` tokens in total."""
        ended = [sequence for sequence in self.ended if sequence.logits]
        if sum(len(sequence.tokens) for sequence in ended) < least:
            return
        # Forks and prompts with one beginning become neighbors, which share tokens of a replay.
        beginnings = list(dict.fromkeys(tuple(sequence.prompt[:BEGINNING]) for sequence in ended))
        ended.sort(key=lambda sequence: (beginnings.index(tuple(sequence.prompt[:BEGINNING])), sequence.positions[0]))
        self.ended = []
        share = self.unreplayed / max(1, sum(len(sequence.tokens) for sequence in ended))  # forks share tokens
        self.unreplayed = 0
        self.deviations.compare(ended, lambda tokens: self._advance(round(share * tokens)))
