"""Forced and greedy decode: what reaches the engine, in which order, and that nothing of the prefill is ever scored."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from fake_engine import EOS, CharTokenizer, FakeEngine, fake_engine

from pipeline.core.errors import UserError
from pipeline.core.records import OnePassEngine, Sample
from stages.evaluate.decode import Logits, forced_decode, greedy_decode
from stages.evaluate.tokens import EncodedSample, encode, workloads_digest

SAMPLES = [
    Sample(id="a", workload="w", prompt="abc", reference="xy"),
    Sample(id="b", workload="w", prompt="abcdefgh", reference="x"),
    Sample(id="c", workload="w", prompt="zz", reference="long answer"),
    Sample(id="d", workload="w", messages=(("user", "hi"),), reference="prose goes on", check="none"),
]


def encoded() -> list[EncodedSample]:
    return encode(SAMPLES, CharTokenizer(), max_scored_tokens=5)


def test_references_end_with_eos_when_judged_and_are_cut_when_not() -> None:
    a, _, _, d = encoded()
    assert a.reference == (*b"xy", EOS)
    assert d.reference == tuple(b"prose")
    assert d.prompt == tuple(b"<user>hi")


@pytest.mark.parametrize(
    ("sample", "part"),
    [(Sample(id="s", workload="w", prompt="a", reference="b"), "prompt"),
     (Sample(id="s", workload="w", prompt="ab", reference=""), "reference")],
)  # fmt: skip
def test_a_sample_without_enough_tokens_is_refused(sample: Sample, part: str) -> None:
    with pytest.raises(UserError, match=f"the {part} of sample s is too short"):
        encode([sample], CharTokenizer(), 9)


def test_the_digest_covers_prompts_references_and_checks() -> None:
    changed = [Sample(id="a", workload="w", prompt="abc", reference="xy", check="json"), *SAMPLES[1:]]
    assert workloads_digest(encoded()) != workloads_digest(encode(changed, CharTokenizer(), 5))
    assert workloads_digest(encoded()) == workloads_digest(encoded())


@pytest.mark.parametrize("batch_size", [1, 2, 3, 16])
def test_every_token_from_the_prompts_last_on_goes_through_decode(batch_size: int) -> None:
    engine = fake_engine(SAMPLES)
    list(forced_decode(engine, encoded(), batch_size))
    by_prompt = {prompt: engine.decoded[handle] for handle, prompt in enumerate(engine.prefilled)}
    for item in encoded():
        # the last reference token predicts nothing that is scored
        assert by_prompt[item.prompt[:-1]] == [item.prompt[-1], *item.reference[:-1]]
    assert engine.live == 0
    assert max(engine.widths) <= batch_size


def test_every_position_is_scored_once_and_never_from_the_prefill() -> None:
    engine = fake_engine(SAMPLES)
    seen: dict[tuple[int, int], float] = {}
    for step in forced_decode(engine, encoded(), 2):
        for i, position, row in zip(step.samples, step.positions, step.logits_BV, strict=True):
            assert (i, position) not in seen
            seen[i, position] = float(row.max())
    assert set(seen) == {(i, t) for i, item in enumerate(encoded()) for t in range(len(item.reference))}
    assert max(seen.values()) < 1e9  # what the fake's prefill returns


def test_a_finished_sequence_makes_room_for_the_next() -> None:
    engine = fake_engine(SAMPLES)
    list(forced_decode(engine, encoded(), 2))
    assert engine.widths.count(2) > len(engine.widths) // 2


def test_ragged_batches_give_the_logits_of_single_runs() -> None:
    def run(batch_size: int) -> dict[tuple[int, int], np.ndarray]:
        steps = forced_decode(fake_engine(SAMPLES), encoded(), batch_size)
        return {(i, t): row for s in steps for i, t, row in zip(s.samples, s.positions, s.logits_BV, strict=True)}

    alone, together = run(1), run(3)
    assert alone.keys() == together.keys()
    for key, row in alone.items():
        np.testing.assert_array_equal(row, together[key])


def test_the_corruption_comes_after_the_prefill_and_before_the_first_decode() -> None:
    engine = fake_engine(SAMPLES)
    events: list[tuple[int, int]] = []
    steps = forced_decode(
        engine, encoded(), len(SAMPLES), after_prefill=lambda: events.append((len(engine.prefilled), len(engine.widths)))
    )
    list(steps)
    assert events == [(len(SAMPLES), 0)]


@dataclass
class OnePassFake(FakeEngine):
    """Computes forced decode at once; whether the keys were corrupted shows in its logits as in `decode`'s."""

    def forced(self, tokens: Sequence[int], first: int) -> Logits:
        return np.stack([self._logits(tokens[: i + 1], 1) for i in range(first, len(tokens))])


def test_an_engine_that_can_is_asked_for_one_pass_and_gives_the_same_steps() -> None:
    stepwise, engine = fake_engine(SAMPLES), OnePassFake(fake_engine(SAMPLES).answers)
    assert isinstance(engine, OnePassEngine)
    assert not isinstance(stepwise, OnePassEngine)
    together, alone = ({(i, t): row for s in steps for i, t, row in zip(s.samples, s.positions, s.logits_BV, strict=True)}
                       for steps in (forced_decode(engine, encoded(), 3), forced_decode(stepwise, encoded(), 1)))  # fmt: skip
    assert together.keys() == alone.keys()
    for key, row in alone.items():
        np.testing.assert_array_equal(row, together[key])
    assert engine.prefilled == []
    list(forced_decode(engine, encoded(), 3, one_pass=False))
    assert len(engine.prefilled) == len(SAMPLES)


def test_the_corruption_comes_before_the_one_pass() -> None:
    engine = OnePassFake(fake_engine(SAMPLES).answers)
    (first, *_) = forced_decode(engine, encoded(), 3, after_prefill=lambda: engine.corrupt_key_scale(0.1))
    (sound, *_) = forced_decode(OnePassFake(engine.answers), encoded(), 3)
    assert first.logits_BV.max() < sound.logits_BV.max()


def test_greedy_answers_stop_at_eos_or_at_the_limit() -> None:
    items = encoded()[:3]
    engine = fake_engine(SAMPLES)
    answers = greedy_decode(engine, items, 2, [9, 9, 4], EOS)
    assert answers == [list(b"xy"), list(b"x"), list(b"long")]
    assert engine.live == 0


def test_greedy_decode_of_nothing_is_nothing() -> None:
    assert greedy_decode(FakeEngine({}), [], 4, [], EOS) == []
