"""Forced and greedy decode: the inputs of the engine, their order, and the answers. Prefill logits are never scored."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.engines.fake import EOS, CharTokenizer, FakeEngine, OnePassFake, fake_engine, sharing_engine

from stages.core.errors import UserError
from stages.core.records import LoadTimes, Sample
from stages.engines.interface import Logits
from stages.evaluate.decoding.decode import DecodeStep, StoppingCriteria, decode
from stages.evaluate.decoding.stored import SampleResult
from stages.evaluate.inputs.tokens import (
    EncodedSample,
    control_samples,
    count_tokens,
    encode,
    repeated_samples,
    workloads_digest,
)
from stages.workloads.config import CONTROL_SAMPLES

SAMPLES = [
    Sample(id="a", workload="w", prompt="abc", reference="xy"),
    Sample(id="b", workload="w", prompt="abcdefgh", reference="x"),
    Sample(id="c", workload="w", prompt="zz", reference="long answer"),
    Sample(id="d", workload="w", messages=(("user", "hi"),), reference="prose goes on", check="none"),
]


def encoded() -> list[EncodedSample]:
    return encode(SAMPLES, CharTokenizer(), max_scored_tokens=5)


def steps_of(*arguments: Any, **options: Any) -> Iterator[DecodeStep]:
    return (event for event in decode(*arguments, **options) if isinstance(event, DecodeStep))


Rows = dict[tuple[int, int], np.ndarray]


def rows_of(*arguments: Any, **options: Any) -> Rows:
    """Return the logits of a decode by sample and position."""
    steps = steps_of(*arguments, **options)
    return {
        (token.sample, token.position): row for step in steps for token, row in zip(step.tokens, step.logits_BV, strict=True)
    }


def assert_same(actual: Rows, expected: Rows) -> None:
    assert actual.keys() == expected.keys()
    for key, row in actual.items():
        np.testing.assert_array_equal(row, expected[key])


def answers_of(engine: FakeEngine, items: list[EncodedSample], batch_size: int) -> dict[int, SampleResult]:
    events = decode(engine, items, batch_size, StoppingCriteria((EOS,), 4))
    return {event.sample: event for event in events if isinstance(event, SampleResult)}


def test_judged_samples_are_repeated_and_the_shortest_are_the_control() -> None:
    a, b, c, d = encoded()
    once, twice = SimpleNamespace(noise_samples=1), SimpleNamespace(noise_samples=2)
    other = replace(a, sample=replace(a.sample, workload="other"))
    repeated: Any = repeated_samples
    assert repeated([d, a, b, c, other], once) == [c, other]
    assert repeated([d, a, b, c, other], twice) == [a, c, other]
    assert repeated([d], once) == [d]
    assert repeated([d, a], SimpleNamespace(noise_samples=0)) == []
    assert control_samples([a, b, c, d], 3, 2) == [a, b]
    assert control_samples([a, b, c, d], 4, 2) == [b, a]
    assert [len(control_samples([a] * count, 1)) for count in (20, 3)] == [CONTROL_SAMPLES, 3]


def test_judged_references_end_with_eos_and_others_are_cut() -> None:
    a, _, _, d = encoded()
    assert (a.reference, d.reference, d.prompt) == ((*b"xy", EOS), tuple(b"prose"), tuple(b"<user>hi"))
    changed = [replace(SAMPLES[0], check="json"), *SAMPLES[1:]]
    assert workloads_digest(encoded()) == workloads_digest(encoded()) != workloads_digest(encode(changed, CharTokenizer(), 5))
    for prompt, reference, part in (("a", "b", "prompt"), ("ab", "", "reference")):
        with pytest.raises(UserError, match=f"the {part} of sample s is too short"):
            encode([Sample("s", "w", reference, prompt=prompt)], CharTokenizer(), 9)
    with pytest.raises(UserError, match="the reference of sample s holds a token that ends answers"):
        encode([Sample("s", "w", f"b{chr(EOS)}", prompt="ab")], CharTokenizer(), 9)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 16])
def test_every_token_from_the_last_of_the_prompt_is_decoded(batch_size: int) -> None:
    engine = fake_engine(SAMPLES)
    list(decode(engine, encoded(), batch_size))
    by_prompt = {prompt: engine.decoded[handle] for handle, prompt in enumerate(engine.prefilled)}
    for item in encoded():
        # no scored token depends on the last reference token
        assert by_prompt[item.prompt[:-1]] == [item.prompt[-1], *item.reference[:-1]]
    assert engine.live == 0
    assert max(engine.widths) <= batch_size
    assert engine.widths.count(2) > len(engine.widths) // 2 or batch_size != 2, "an ended sequence makes room for the next"


def test_after_prefill_is_called_between_prefill_and_decode() -> None:
    engine, one_pass = fake_engine(SAMPLES), OnePassFake(fake_engine(SAMPLES).answers)
    events: list[tuple[int, int]] = []
    list(steps_of(engine, encoded(), 4, after_prefill=lambda: events.append((len(engine.prefilled), len(engine.widths)))))
    assert events == [(len(SAMPLES), 0)]
    (corrupted, *_) = steps_of(one_pass, encoded(), 3, after_prefill=lambda: one_pass.corrupt_key_scale(0.1))
    (sound, *_) = steps_of(OnePassFake(one_pass.answers), encoded(), 3)
    assert corrupted.logits_BV.max() < sound.logits_BV.max()


def test_a_one_pass_decode_equals_stepwise_decode() -> None:
    engine = OnePassFake(fake_engine(SAMPLES).answers)
    assert_same(rows_of(engine, encoded(), 3), rows_of(fake_engine(SAMPLES), encoded(), 1))
    assert engine.prefilled == []
    list(decode(engine, encoded(), 3, one_pass=False))
    assert len(engine.prefilled) == len(SAMPLES)


@dataclass
class RequestFake(OnePassFake):
    """An engine of whole requests that records the number of requests per call."""

    together: list[int] = field(default_factory=list)

    def forced_together(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Logits]:
        self.together.append(len(requests))
        return [self.forced(tokens, first) for tokens, first in requests]

    def timed(self, prompts: Sequence[Sequence[int]], steps: int) -> LoadTimes:
        raise NotImplementedError


def test_an_engine_of_whole_requests_gets_full_batches() -> None:
    engine, one_pass = RequestFake(fake_engine(SAMPLES).answers), OnePassFake(fake_engine(SAMPLES).answers)
    finished = [event for event in decode(engine, encoded(), 3) if isinstance(event, SampleResult)]
    assert engine.together == [3, 1]
    assert [event.trace.batch for event in finished] == [3, 3, 3, 1]
    engine.max_batch = 2  # the engine computes at most two of the three requests together
    fewer = [event.trace.batch for event in decode(engine, encoded(), 3) if isinstance(event, SampleResult)]
    assert fewer == [2, 2, 2, 1]
    (shortest,) = [event for event in finished if event.sample == 2]
    assert shortest.trace.longest_context == len("zz") + len(encoded()[2].reference) - 1
    in_one_pass = [event for event in decode(one_pass, encoded(), 3) if isinstance(event, SampleResult)]
    assert {event.trace.batch for event in in_one_pass} == {0}, "there was no decode step"
    assert_same(rows_of(engine, encoded(), 3), rows_of(one_pass, encoded(), 3))


WRONG = ("a", "c")


@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("make", [fake_engine, sharing_engine])
def test_answers_equal_greedy_decode_from_the_prompt(make: Any, batch_size: int) -> None:
    def greedy_answer(item: EncodedSample) -> list[int]:
        engine = fake_engine(SAMPLES, wrong=WRONG)
        (handle,), _ = engine.prefill([item.prompt[:-1]])
        answer = [int(engine.decode([handle], [item.prompt[-1]])[0].argmax())]
        while answer[-1] != EOS and len(answer) < len(item.reference) + 4:
            answer.append(int(engine.decode([handle], [answer[-1]])[0].argmax()))
        return answer

    engine = make(SAMPLES, wrong=WRONG)
    finished = answers_of(engine, encoded(), batch_size)
    expected = {i: tuple(greedy_answer(item)) if item.sample.judged else None for i, item in enumerate(encoded())}
    assert {i: event.answer for i, event in finished.items()} == expected
    assert finished[0].answer != (*b"xy", EOS)
    assert finished[1].answer == (*b"x", EOS)
    assert engine.live == 0
    assert max(engine.widths) <= batch_size


def test_a_forking_engine_computes_no_reference_token_twice() -> None:
    plain, sharing = fake_engine(SAMPLES, wrong=WRONG), sharing_engine(SAMPLES, wrong=WRONG)
    for engine in (plain, sharing):
        answers_of(engine, encoded(), 2)
    assert len(plain.prefilled) == len(SAMPLES) + len(WRONG)
    assert (len(sharing.prefilled) - sharing.forks, sharing.forks) == (len(SAMPLES), len(WRONG))
    assert sum(sharing.widths) == sum(plain.widths) - len(WRONG), "the first token of both wrong answers is decoded once"


def test_other_samples_of_a_batch_do_not_change_forced_logits() -> None:
    alone = rows_of(fake_engine(SAMPLES, wrong=WRONG), encoded(), 1)
    assert_same(alone, rows_of(fake_engine(SAMPLES, wrong=WRONG), encoded(), 3))
    assert_same(alone, rows_of(sharing_engine(SAMPLES, wrong=WRONG), encoded(), 3, StoppingCriteria((EOS,), 4)))


def test_non_finite_logits_end_an_answer_without_a_token() -> None:
    for make in (fake_engine, sharing_engine):
        finished = answers_of(make(SAMPLES, not_a_number=True), encoded(), 2)
        assert [finished[i].answer for i in range(4)] == [(), (), (), None]


DOCUMENT = "".join(chr(32 + i % 90) for i in range(70))
QUESTIONS = [
    Sample(id=f"{name}{i}", workload="w", prompt=f"{name}{DOCUMENT}{i}" + "?" * i, reference=f"{i}", document=name)
    for i in range(3) for name in ("one", "two")
]  # fmt: skip


def test_samples_share_the_prefix_of_their_document() -> None:
    alone = Sample(id="s", workload="w", prompt="one" + DOCUMENT, reference="s", document="other")
    short = [Sample(id=f"t{i}", workload="w", prompt=f"short{i}", reference="s", document="short") for i in range(2)]
    odd = Sample(id="odd", workload="w", prompt="x" + DOCUMENT, reference="s", document="one")
    items = encode([*QUESTIONS, alone, *short, odd], CharTokenizer(), 9)
    assert [item.shared for item in items] == [73] * 6 + [0] * 4
    nested = [replace(QUESTIONS[0], prompt="one" + DOCUMENT[:n]) for n in (64, 67, 70)]
    # The shortest prompt's last token is decoded, and so is not part of the shared prefix.
    assert {item.shared for item in encode(nested, CharTokenizer(), 9)} == {66}
    exactly = [replace(QUESTIONS[0], prompt=DOCUMENT[:64] + "ab"[i] * 2) for i in range(2)]
    assert {item.shared for item in encode(exactly, CharTokenizer(), 9)} == {64}


def test_tokens_that_the_questions_of_a_document_share_count_once() -> None:
    items = encode(QUESTIONS, CharTokenizer(), 9)
    separate = sum(len(item.prompt) + len(item.reference) for item in items)
    assert count_tokens(items, once=False) == separate
    assert count_tokens(items, once=True) == separate - 2 * 2 * 73  # two documents, each shared by three questions


@pytest.mark.parametrize("batch_size", [1, 2, 4, 16])
def test_a_document_is_prefilled_once_for_all_its_questions(batch_size: int) -> None:
    items = encode(QUESTIONS, CharTokenizer(), 9)
    engine = sharing_engine(QUESTIONS, wrong=("one1",))
    finished = answers_of(engine, items, batch_size)
    prefilled = [prompt for prompt in engine.prefilled if prompt]
    assert sorted(prefilled) == [items[0].prompt[:73], items[1].prompt[:73]]
    assert sorted(engine.extended) == sorted(item.prompt[73:-1] for item in items if item.prompt[73:-1])
    assert engine.live == 0
    assert engine.most_live <= 2 * batch_size + 1
    right = {i: item.reference for i, item in enumerate(items) if item.sample.id != "one1"}
    assert {i: finished[i].answer for i in right} == right


def test_an_engine_without_room_for_forks_does_not_fork() -> None:
    engine = sharing_engine(QUESTIONS, wrong=("one1",), max_sequences=8)
    answers_of(engine, encode(QUESTIONS, CharTokenizer(), 9), 4)
    assert engine.forks == 0
    answers_of(engine, encode(QUESTIONS, CharTokenizer(), 9), 3)
    assert engine.forks == len(QUESTIONS) + 1


@pytest.mark.parametrize("make", [fake_engine, sharing_engine])
def test_a_decode_that_the_caller_stops_early_releases_its_sequences(make: Callable[..., FakeEngine]) -> None:
    """Whichever event is the last, live sequences, waiting forks and shared prefixes are released."""
    items = encode(QUESTIONS, CharTokenizer(), 9)
    arguments = (items, 2, StoppingCriteria((EOS,), 4))
    for count in range(1, len(list(decode(make(QUESTIONS, wrong=["one1"]), *arguments))) + 1):
        engine = make(QUESTIONS, wrong=["one1"])
        taken = list(islice(decode(engine, *arguments), count))
        assert (len(taken), engine.live) == (count, 0), "the generator is closed when its last reference ends"
