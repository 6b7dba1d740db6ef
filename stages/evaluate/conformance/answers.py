"""Checks the free answers of the stress test: their lengths, and that every token is the most likely one."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stages.engines.reference.attention import Fed
from stages.engines.reference.replay import Replay
from stages.evaluate.conformance.comparer import Comparer
from stages.evaluate.conformance.deviations import passes
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.evaluate.decoding.free import contradiction

Answer = tuple[ForcedSequence, list[int]]
"""(sequence with the prompt, tokens of its answer including the stop token)."""


class AnswerChecks:
    """Collects the answers of a scenario, checks them, and reports wrong answers."""

    def __init__(self, comparer: Comparer, failures: list[str]) -> None:
        """Start without answers. `failures`: list that receives the messages."""
        self.comparer, self.engine, self.failures = comparer, comparer.engine, failures
        self.answers: list[Answer] = []

    def take(
        self, sequence: ForcedSequence, answer: Sequence[int], limit: int, stops: Sequence[int], longer: Sequence[int]
    ) -> None:
        """Check an answer's length, and keep the answer for the other checks.

        `longer` is an answer to the same prompt without stop tokens, or empty. The token that follows in it ended this answer.
        If it has other tokens, because a rounding differed, the stop token is unknown; if empty, the last one is assumed.
        """
        follows = [token for token in longer[len(answer) :][:1] if token in stops]
        ended = len(answer) < limit and bool(stops)
        stopped = (follows or list(stops[-1:])) if ended and list(longer[: len(answer)]) in ([], list(answer)) else []
        wrong = []
        if (len(answer) < limit and not ended) or len(answer) > limit:
            wrong.append(f"{len(answer)} tokens instead of {limit}")
        if not set(answer).isdisjoint(stops):
            wrong.append("an answer that contains a stop token,")
        self.failures += [f"generate: {what} to a prompt of {len(sequence.prompt)} tokens" for what in wrong]
        if answer or stopped:
            self.answers.append((sequence, [*answer, *stopped]))

    def check_forced(self) -> list[Answer]:
        """Check the answers that the engine was also forced to decode, by its own logits. Return the other answers."""
        answers, self.answers = self.answers, []
        if self.comparer.reference.assumed_rounding is None:
            return []
        unforced = []
        for sequence, answer in answers:
            rows, begin = sequence.logits[: len(answer)], len(sequence.prompt)
            if len(rows) == len(answer) and sequence.tokens[begin : begin + len(answer) - 1] == answer[:-1]:
                self._check_likelier(sequence, np.stack(rows), answer)
            else:
                unforced.append((sequence, answer))
        return unforced

    def check(self, answers: Sequence[Answer], force: Callable[[ForcedSequence], None], advance: Callable[[int], None]) -> None:
        """Check that every token is the most likely on the reference engine, up to rounding.

        The reference engine uses its own codes, and a single flipped code may change an answer. An answer that looks wrong is
        therefore checked again by the engine's own logits.

        Args:
            force: Decodes a sequence on the engine and records its logits.
            advance: Called with the number of replayed tokens.
        """
        answers = list(_longest(answers))
        feds = [
            Fed([*sequence.prompt, *answer[:-1]], [(len(sequence.prompt), False), (len(answer) - 1, True)])
            for sequence, answer in answers
        ]
        replays = list[Replay]()
        for group in passes(feds):
            replays += self.comparer.reference.replay(group, disturbed=False)
            advance(sum(len(fed.tokens) for fed in group))
        for (sequence, answer), replay in zip(answers, replays, strict=True):
            if contradiction(self.engine, replay.logits, answer) is not None:
                forced = ForcedSequence(f"{sequence.name}, forced", sequence.prompt, answer[:-1])
                force(forced)
                self._check_likelier(sequence, np.stack(forced.logits), answer)

    def _check_likelier(self, sequence: ForcedSequence, logits: np.ndarray, answer: list[int]) -> None:
        """Report the first token that the engine's own logits (rows, V) contradict."""
        contradicted = contradiction(self.engine, logits, answer)
        if contradicted is not None:
            place, distance = contradicted
            self.failures.append(
                f"generate: token {place + 1} of the answer to a prompt of {len(sequence.prompt)} tokens ({sequence.name}) is "
                f"{distance:.2g} (logits) below the most likely token"
            )


def _longest(answers: Sequence[Answer]) -> Iterator[Answer]:
    """Yield the answers, except beginnings of longer answers to the same prompt."""
    longest = defaultdict[tuple[int, ...], list[list[int]]](list)
    for sequence, answer in sorted(answers, key=lambda pair: -len(pair[1])):
        same_prompt = longest[tuple(sequence.prompt)]
        if not any(longer[: len(answer)] == answer for longer in same_prompt):
            same_prompt.append(answer)
            yield sequence, answer
