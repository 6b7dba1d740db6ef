"""Checks the free answers of the stress test: their lengths, and that every token is the most likely one."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stages.core.records import StoredCopy
from stages.engines.interface import Continuation, Logits, SupportsStored
from stages.engines.reference.replay import Replay
from stages.evaluate.conformance.comparer import SequenceComparer
from stages.evaluate.conformance.deviations import group_passes
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.evaluate.decoding.free import contradiction
from stages.policies.policy import Side


class Answer(NamedTuple):
    sequence: ForcedSequence
    tokens: list[int]
    stops: tuple[int, ...]
    """The stop tokens if a stop token ended the answer, else empty. `generate` does not return that stop token."""

    @property
    def fed(self) -> list[int]:
        """The tokens of the answer to feed after the prompt, so that logits exist for all its tokens."""
        return self.tokens if self.stops else self.tokens[:-1]

    @property
    def forced(self) -> ForcedSequence:
        """The prompt and the tokens to feed, without logits of the engine."""
        name, prompt, fed = self.sequence.name, self.sequence.prompt, self.fed
        return ForcedSequence(name, prompt, tokens=[*prompt, *fed], pieces=[(len(prompt), False), (len(fed), True)])

    def chosen(self, logits: Logits) -> list[int]:
        """Return the tokens to check against `logits` (rows, V): the answer, and the most likely stop token if one ended it."""
        return [*self.tokens, *([max(self.stops, key=logits[-1].__getitem__)] if self.stops else [])]


class AnswerChecks:
    def __init__(self, comparer: SequenceComparer, failures: list[str]) -> None:
        self.comparer, self.engine, self.failures = comparer, comparer.engine, failures
        self.answers: list[Answer] = []
        self.stored: dict[tuple[int, ...], list[dict[Side, StoredCopy]]] = {}
        """The codes that the engine stored while it answered, by the tokens of the prompt and the answer."""

    def observe(self, requests: Sequence[Continuation]) -> None:
        """Record the stored codes of requests of `generate`, if the engine exposes them and its answers are checked."""
        if not isinstance(self.engine, SupportsStored) or self.comparer.reference.assumed_rounding is None:
            return
        for request in requests:
            layers = self.engine.stored(request.sequence)
            self.stored[tuple(request.tokens[: request.stored])] = [dict(layer) for layer in layers]

    def take(self, sequence: ForcedSequence, tokens: Sequence[int], limit: int, stops: Sequence[int]) -> None:
        """Check the length of an answer, and keep the answer for the other checks."""
        ended = len(tokens) < limit and bool(stops)
        wrong = []
        if (len(tokens) < limit and not ended) or len(tokens) > limit:
            wrong.append(f"{len(tokens)} tokens instead of {limit}")
        if not set(tokens).isdisjoint(stops):
            wrong.append("an answer that contains a stop token,")
        self.failures += [f"generate: {what} to a prompt of {len(sequence.prompt)} tokens" for what in wrong]
        if tokens or ended:
            self.answers.append(Answer(sequence, list(tokens), tuple(stops) if ended else ()))

    def check_forced(self) -> list[Answer]:
        """Check the answers that the engine was also forced to decode, by its own logits. Return the others.

        Without an assumed rounding, answers are dropped unchecked.
        """
        answers, self.answers = self.answers, []
        if self.comparer.reference.assumed_rounding is None:
            return []
        unforced = []
        for answer in answers:
            fed, begin = answer.fed, len(answer.sequence.prompt)
            rows = answer.sequence.logits[: len(fed) + 1]
            if len(rows) == len(fed) + 1 and answer.sequence.tokens[begin : begin + len(fed)] == fed:
                self._check_likelier(answer, np.stack(rows))
            else:
                unforced.append(answer)
        return unforced

    def check(
        self, answers: Sequence[Answer], force: Callable[[ForcedSequence], None], advance: Callable[[int], None]
    ) -> list[ForcedSequence]:
        """Check that every token is the most likely on the reference engine, up to rounding.

        A single flipped code may change an answer. An answer that looks wrong is therefore checked again: the reference engine
        replays it over the codes that the engine stored for it. If these are unknown, `force` lets the engine decode it again,
        and the engine's own logits decide. Return the replayed sequences, whose stored codes must still be compared.
        """
        stored, self.stored = self.stored, {}
        suspects = []
        answers = list(_longest(answers))
        replays = list[Replay]()
        for group in group_passes([answer.forced for answer in answers]):
            replays += [replay for replay, _ in self.comparer.replay(group, disturbed=False)]
            advance(sum(len(sequence.tokens) for sequence in group))
        for answer, replay in zip(answers, replays, strict=True):
            if contradiction(self.engine, replay.logits, answer.chosen(replay.logits)) is not None:
                sequence = answer.forced
                sequence.layers = stored.get(tuple(sequence.tokens), [])
                if sequence.layers:
                    [(again, _)] = self.comparer.replay([sequence], disturbed=False)
                    sequence.logits, sequence.places = list(again.logits), [None] * len(again.logits)
                    sequence.name = f"generate: {sequence.name}"
                    suspects.append(sequence)
                else:
                    sequence = ForcedSequence(f"{answer.sequence.name}, forced", answer.sequence.prompt, list(answer.fed))
                    force(sequence)
                self._check_likelier(answer, np.stack(sequence.logits))
        return suspects

    def _check_likelier(self, answer: Answer, logits: np.ndarray) -> None:
        """Report the first token of an answer that the logits (rows, V) contradict."""
        contradicted = contradiction(self.engine, logits, answer.chosen(logits))
        if contradicted is not None:
            place, distance = contradicted
            self.failures.append(
                f"generate: token {place + 1} of the answer to a prompt of {len(answer.sequence.prompt)} tokens "
                f"({answer.sequence.name}) is {distance:.2g} (logits) below the most likely token"
            )


def _longest(answers: Sequence[Answer]) -> Iterator[Answer]:
    """Yield the answers, longest first, without those that begin another answer to the same prompt.

    If a stop token ended an answer, a stop token must also follow in the longer answer.
    """
    longest = defaultdict[tuple[int, ...], list[list[int]]](list)
    for answer in sorted(answers, key=lambda answer: -len(answer.tokens)):
        same_prompt, count = longest[tuple(answer.sequence.prompt)], len(answer.tokens)
        alike = [longer for longer in same_prompt if longer[:count] == answer.tokens]
        if not any(not answer.stops or set(longer[count : count + 1]) & set(answer.stops) for longer in alike):
            same_prompt.append(answer.tokens)
            yield answer
