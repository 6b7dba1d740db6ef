"""Summaries of distances, judged answers, and the baseline's own answers as references."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engines.fake import EOS, CharTokenizer, OnePassFake, fake_engine, sharing_engine
from helpers.verdicts.evaluations import brief_workloads, evaluate, measure_baseline

from stages.core.records import Check, Sample
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.inputs.checks import judge
from stages.evaluate.joining import context_bin, fidelity
from stages.verdict.report import SampleRow, load_report, load_rows


def test_fidelity_of_a_small_example() -> None:
    steps = StepStatistics(
        kl=np.array([0.0, 0.1, 0.2, 0.5]),
        baseline_nll=np.ones(4),
        candidate_nll=np.array([1.0, 1.2, 1.0, 1.2]),
        top1=np.array([1.0, 1.0, 1.0, 0.0]),
        top10=np.array([1.0, 0.9, 0.8, 0.7]),
    )
    summary = fidelity(steps)
    assert summary.kl_mean == pytest.approx(0.2)
    assert summary.kl_max == 0.5
    assert summary.kl_p999 == pytest.approx(float(np.percentile([0, 0.1, 0.2, 0.5], 99.9)))
    assert summary.ppl_ratio == pytest.approx(math.exp(0.1))
    assert summary.top1_agreement == 0.75
    assert summary.top10_overlap == pytest.approx(0.85)
    with_nan = fidelity(steps._replace(kl=np.array([0.1, math.nan, 0.1, 0.1])))
    assert (with_nan.kl_mean, with_nan.kl_p999, with_nan.kl_max, with_nan.non_finite_steps) == (None, None, None, 1)


def test_context_bins_are_half_open_and_the_last_is_open() -> None:
    bins = [context_bin(tokens, [0, 256, 512]) for tokens in (1, 255, 256, 9999)]
    assert bins == [(0, 256), (0, 256), (256, 512), (512, None)]


TOOLS = (("pay", ("bill", "total")), ("list", ("city",)))
CALL = '{"name":"pay","arguments":{"bill":"A1","total":"3"}}'
UNDECLARED = [
    '{"name":"pay","arguments":{"bill":"A1"}}',
    '{"name":"pay","arguments":{"bill":"A1","total":"3","city":"x"}}',
    '{"name":"steal","arguments":{}}',
    '{"name":["pay"],"arguments":{"bill":"A1","total":"3"}}',
]
NOT_JSON = ["", "{", '{"a":1} ok', 'ok {"a":1}', '{"a":1}{"a":1}', "{'a':1}", '{"a":1,}', '```{"a":1}```']
NOT_STRICT = ['{"a":1,"a":1}', '{"a":NaN}', "Infinity"]


@pytest.mark.parametrize(
    ("check", "reference", "text", "correct"),
    [
        ("json", '{"a": 12}', '{"a": 12.0}', True),
        ("json", '{"a": [0.5, 1e2]}', '{"a": [5e-1, 100]}', True),
        ("json", '{"a": 1}', '{"a": true}', False),
        ("json", '{"a": 1}', '{"a": "1"}', False),
        ("json", '{"a": 12}', '{"a": 12.5}', False),
        ("json", '{"a": 10000000000000001}', '{"a": 10000000000000002}', False),
        ("json", '{"a":1,"b":2}', ' {"b": 2, "a": 1}\n', True),
        ("json", "[1,2]", "[2,1]", False),
        *(("json", '{"a":1}', text, False) for text in NOT_JSON + NOT_STRICT),
        ("tool_call", CALL, CALL, True),
        ("tool_call", CALL, '{"arguments":{"total":"3","bill":"A1"},"name":"pay"}', True),
        ("tool_call", CALL, '{"name":"pay","arguments":{"bill":"A2","total":"3"}}', False),
        ("tool_call", CALL, '{"name":"list","arguments":{"city":"Cork"}}', False),
        *(("tool_call", call, call, False) for call in UNDECLARED),
        ("exact", "a b", "a b", True),
        ("exact", "a b", "a b ", False),
    ],
)
def test_json_is_judged_by_value_and_text_exactly(check: Check, reference: str, text: str, correct: bool) -> None:
    sample = Sample(id="s", workload="w", reference=reference, prompt="p", check=check, tools=TOOLS)
    assert judge(sample, text) is correct


PEACOCK, MIRA = "\u092e\u094b\u0930", "\u092e\u0940\u0930"
KEYCAP = "5\N{VARIATION SELECTOR-16}\N{COMBINING ENCLOSING KEYCAP}"
WATER, LEAD = "\u0e19\u0e49\u0e33", "\u0e19\u0e33"


@pytest.mark.parametrize(
    ("reference", "distractors", "mentions", "right", "wrong"),
    [
        ("4711", (), (), ("4711", "The code is 4711.", "code: **4711**\n", "It is 4711, not 4712"), ("", "I do not know.")),
        # A part of a number or of a hyphenated word is no mention, and a minus sign belongs to its number.
        ("4711", (), (), (), ("47110", "4711.5", "-4711", "4 711", "4,711", "four", "4711:30")),
        ("-5", (), (), ("it is -5", "It is \N{MINUS SIGN}5."), ("5", "a-5", "3-5", "3\N{MINUS SIGN}5")),
        ("5", (), (), (KEYCAP,), ("\N{MINUS SIGN}5", "a\N{NON-BREAKING HYPHEN}5")),
        # Vowels and tones that are combining marks: "peacock" and "Mira" in Hindi, "water" and "lead" in Thai.
        (PEACOCK, (), (), (f"({PEACOCK})", f"{PEACOCK}, {MIRA}"), (MIRA, f"{MIRA}-5", PEACOCK[::2])),
        (WATER, (), (), (f"{WATER} 5",), (LEAD,)),
        ("Mara's e-mail", (), (), ("mara s E-Mail",), ("Mara's e mail",)),
        ("STRASSE 42", (), (), ("Stra\N{LATIN SMALL LETTER SHARP S}e \N{FULLWIDTH DIGIT FOUR}2",), ("Strase 42",)),
        ("Lisbon", ("Graz",), (), ("lisbon, not Grazing",), ("Lisbon or Graz",)),
        ("Mara Voss", (), (), ('Her name is "Mara  VOSS".',), ("Mara, or Tobin Voss",)),  # the words must be consecutive
        ("Mara lives in Graz. She bought a lamp.", (), ("Graz", "lamp"), ("A lamp; Graz",), ("Graz",)),
    ],
)
def test_an_answer_must_mention_all_phrases_and_no_distractor(
    reference: str, distractors: tuple[str, ...], mentions: tuple[str, ...], right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    sample = Sample("s", "w", reference, prompt="p", check="mention", mentions=mentions, distractors=distractors)
    assert {text: judge(sample, text) for text in (*right, *wrong)} == dict.fromkeys(right, True) | dict.fromkeys(wrong, False)


TOKENIZER = CharTokenizer()
CONFIG = brief_workloads(extra_new_tokens=4)
SAMPLES = [
    Sample(f"s{i}", "lookup", f"The code is {i:02}.", prompt=f"q{i:02}", check="mention", mentions=(f"{i:02}",))
    for i in range(12)
]
ANSWERS = {
    "s1": "It is 01.",
    "s2": "It is 77.",  # wrong
    "s3": "03 is the code, I say",  # cut, because it exceeds the maximum length of an answer
}
ANSWERED = [replace(sample, reference=ANSWERS.get(sample.id, sample.reference)) for sample in SAMPLES]
"""The samples with the fake engine's answers as references."""
RESCORED = {"s1": [*b"It is 01.", EOS], "s3": [*b"03 is the code, I say"][: len("The code is 03.") + 1 + 4]}


def one_pass(samples: Sequence[Sample], wrong: Sequence[str] = (), **options: Any) -> OnePassFake:
    plain = fake_engine(samples, wrong)
    return OnePassFake(plain.answers, plain.wrong, **options)


def evaluate_rows(make: Any, folder: Path, **options: Any) -> list[SampleRow]:
    measure_baseline(lambda: make(ANSWERED), SAMPLES, folder / "baseline", config=CONFIG)
    evaluate(lambda: make(ANSWERED, **options), SAMPLES, folder / "baseline", folder / "report", config=CONFIG)
    return load_rows(folder / "report")


@pytest.mark.parametrize("make", [fake_engine, sharing_engine, one_pass])
def test_the_baselines_right_answer_is_scored_if_likelier(make: Any, tmp_path: Path) -> None:
    rows = {row.id: row for row in evaluate_rows(make, tmp_path)}
    assert {name for name, row in rows.items() if row.right_answer == "baseline"} == RESCORED.keys()
    for name, tokens in RESCORED.items():
        row = rows[name]
        assert row.scored_tokens == len(tokens)
        assert row.reference == SAMPLES[int(name[1:])].reference
        assert row.baseline_generation == row.candidate_generation == TOKENIZER.text(tokens)
        assert row.baseline_probability == row.candidate_probability == pytest.approx(1, abs=0.2)
        assert row.max_kl == pytest.approx(0, abs=1e-9)
    assert (rows["s2"].baseline_probability or 0) < 1e-9
    report = load_report(tmp_path / "report")
    assert report.baseline_tests.noise is not None
    assert report.baseline_tests.noise.kl_max == pytest.approx(0, abs=1e-9)
    assert report.baseline_tests.noise.tokens == sum(
        rows[f"s{i}"].scored_tokens for i in range(4)
    )  # the noise floor repeats the scored answers
    assert report.overall.fidelity.tokens == sum(row.scored_tokens for row in rows.values())


def test_the_limit_of_an_answer_comes_from_the_original_reference(tmp_path: Path) -> None:
    rambling = [replace(sample, reference="x" * 99) if sample.id in RESCORED else sample for sample in ANSWERED]
    measure_baseline(lambda: fake_engine(ANSWERED), SAMPLES, tmp_path / "baseline", config=CONFIG)
    evaluate(lambda: fake_engine(rambling), SAMPLES, tmp_path / "baseline", tmp_path / "report", config=CONFIG)
    answers = {row.id: row.candidate_generation for row in load_rows(tmp_path / "report")}
    assert {name: len(answers[name] or "") for name in RESCORED} == dict.fromkeys(RESCORED, len("The code is 00.") + 1 + 4)


def test_a_baseline_that_was_interrupted_at_its_own_answers_gets_the_same_results(tmp_path: Path) -> None:
    def interrupt(label: str, done: int, _: int) -> None:
        if "own answers" in label and done:
            raise RuntimeError("interrupted")

    measure = partial(measure_baseline, lambda: sharing_engine(ANSWERED), SAMPLES, config=CONFIG)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    measure(whole)
    with pytest.raises(RuntimeError, match="interrupted"):
        measure(resumed, progress=interrupt)
    measure(resumed)
    for name in ("round.json", "logprobs.safetensors", "statistics.safetensors"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
