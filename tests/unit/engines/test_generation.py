"""Greedy generation on any engine: the batch at every step, and the state after an error."""

from collections.abc import Sequence
from itertools import takewhile
from operator import add
from typing import Any

import numpy as np
import pytest

from stages.core.errors import UserError
from stages.core.records import MemoryReport
from stages.engines.base import SequenceTable
from stages.engines.interface import Continuation, Engine, Logits
from stages.policies.policy import FP16_POLICY, KVShape

VOCAB = 32
PROMPTS = [[1] * 9, [2], [3, 4], [5] * 30, [6, 7, 8], [9], [10, 11]]
LIMITS = [12, 1, 3, 2, 7, 9, 1]


class HistoryEngine(Engine):
    """An engine whose next token follows from the whole history. It records the number of live sequences at each step."""

    def __init__(self) -> None:
        super().__init__(FP16_POLICY, KVShape(1, 1, 16), VOCAB)
        self.sequences: SequenceTable[list[int]] = SequenceTable()
        self.steps: list[tuple[str, int, int]] = []
        """Operation, number of its sequences, and number of live sequences at the time."""
        self.fails_at: int | None = None
        """Number of the step that fails."""

    def _logits(self, kind: str, handles: Sequence[int]) -> Logits:
        self.steps.append((kind, len(handles), len(self.sequences)))
        logits = np.zeros((len(handles), VOCAB), np.float32)
        for row, handle in zip(logits, handles, strict=True):
            history = self.sequences[handle]
            row[(sum(history) * 7 + len(history)) % VOCAB] = 1
        if len(self.steps) - 1 == self.fails_at:
            raise RuntimeError("the device is gone")
        return logits

    def _prefill_batch(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        handles = [self.sequences.add(list(prompt)) for prompt in prompts]
        try:
            return handles, self._logits("prefill", handles)
        except Exception:
            self.release(handles)
            raise

    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        for handle, token in zip(sequences, tokens, strict=True):
            self.sequences[handle].append(token)
        return self._logits("decode", sequences)

    def _release(self, sequence: int) -> None:
        del self.sequences[sequence]

    def corrupt_key_scale(self, factor: float) -> None:
        raise AssertionError(f"no generation plants a fault, got {factor}")

    def memory(self) -> MemoryReport:
        return MemoryReport(0, 0, 0, 0, sum(map(len, self.sequences.values())))


def one_by_one(*stops: int) -> list[list[int]]:
    engine = HistoryEngine()
    return [engine.generate([prompt], limit, stops)[0] for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


@pytest.mark.parametrize("max_sequences", [None, 1, 2, 5, 99])
def test_answers_keep_the_order_and_equal_single_prompts(max_sequences: int | None) -> None:
    engine, free = HistoryEngine(), one_by_one()
    assert [len(answer) for answer in free] == LIMITS
    assert engine.generate(PROMPTS, LIMITS, (), max_sequences=max_sequences) == free
    stops = free[4][3], free[2][1]
    stopped = one_by_one(*stops)
    assert engine.generate(PROMPTS, LIMITS, stops, max_sequences=max_sequences) == stopped
    assert stopped == [[*takewhile(lambda token: token not in stops, answer)] for answer in free]
    assert not engine.sequences
    lengths: list[int] = []

    def note(ended: Sequence[Continuation]) -> None:
        assert all(engine.sequences[request.sequence] for request in ended), "released before they are noted"
        lengths.extend(len(request.tokens) for request in ended)

    engine.generate(PROMPTS, LIMITS, (), max_sequences=max_sequences, ended=note)
    assert sorted(lengths) == sorted(map(add, map(len, PROMPTS), LIMITS))


@pytest.mark.parametrize(("supported", "asked"), [(None, 2), (2, None), (2, 3)])
def test_a_finished_sequence_makes_room_for_the_next_prompt(supported: int | None, asked: int | None) -> None:
    engine = HistoryEngine()
    engine.max_sequences = supported
    engine.generate(PROMPTS, LIMITS, (), max_sequences=asked)
    last = max(number for number, (kind, _, _) in enumerate(engine.steps) if kind == "prefill")
    assert {live for kind, _, live in engine.steps[:last] if kind == "decode"} == {2}
    assert max(live for _, _, live in engine.steps) == 2
    assert sum(size for kind, size, _ in engine.steps if kind == "decode") == sum(LIMITS) - len(LIMITS)


@pytest.mark.parametrize("fails_at", [0, 1, 4, 9])
def test_an_error_releases_every_sequence(fails_at: int) -> None:
    engine = HistoryEngine()
    engine.fails_at = fails_at
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.generate(PROMPTS, LIMITS, (), max_sequences=2)
    assert not engine.sequences


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_sequences": 0}, "max_sequences must be at least 1, got 0"),
        ({"prompts": [*PROMPTS[:6], []]}, "a prompt must have at least one token"),
        ({"prompts": [*PROMPTS[:6], [1, VOCAB]]}, rf"token ids must be in \[0, {VOCAB}\), got 1 to {VOCAB}"),
        ({"prompts": [*PROMPTS[:6], [-1]]}, rf"token ids must be in \[0, {VOCAB}\), got -1"),
        ({"max_new_tokens": [1] * 6}, "max_new_tokens must be at least 1 for each of 7 prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1 for each of 7 prompts"),
    ],
)
def test_invalid_arguments_are_refused_before_any_computation(changes: dict[str, Any], message: str) -> None:
    engine = HistoryEngine()
    arguments: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": LIMITS, "stop_tokens": (), "max_sequences": 2}
    with pytest.raises(UserError, match=message):
        engine.generate(**arguments | changes)
    assert engine.steps == []
