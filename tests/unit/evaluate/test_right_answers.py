"""If the baseline answers correctly with other words than the reference, these words are scored for both engines."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluations import brief_workloads, evaluate, measure_baseline
from fake_engine import EOS, CharTokenizer, OnePassFake, fake_engine, sharing_engine

from stages.core.records import Sample
from stages.evaluate.decoding.stored import read_round
from stages.verdict.report import SampleRow, load_report, load_rows

TOKENIZER = CharTokenizer()
CONFIG = brief_workloads(extra_new_tokens=4)
SAMPLES = [
    Sample(f"s{i}", "lookup", f"The code is {i:02}.", prompt=f"q{i:02}", check="mention", mentions=(f"{i:02}",))
    for i in range(12)
]
WORDS = {
    "s1": "It is 01.",
    "s2": "It is 77.",  # wrong
    "s3": "03 is the code, I say",  # cut, because it exceeds the maximum length of an answer
}
SAID = [replace(sample, reference=WORDS.get(sample.id, sample.reference)) for sample in SAMPLES]
RESCORED = {"s1": [*b"It is 01.", EOS], "s3": [*b"03 is the code, I say"][: len("The code is 03.") + 1 + 4]}


def one_pass(samples: Sequence[Sample], wrong: Sequence[str] = (), **options: Any) -> OnePassFake:
    plain = fake_engine(samples, wrong)
    return OnePassFake(plain.answers, plain.wrong, **options)


def judged(make: Any, folder: Path, **options: Any) -> list[SampleRow]:
    measure_baseline(lambda: make(SAID), SAMPLES, folder / "baseline", config=CONFIG)
    evaluate(lambda: make(SAID, **options), SAMPLES, folder / "baseline", folder / "report", config=CONFIG)
    return load_rows(folder / "report")


@pytest.mark.parametrize("make", [fake_engine, sharing_engine, one_pass])
def test_own_words_are_scored_where_they_are_right_and_likelier_than_the_reference(make: Any, tmp_path: Path) -> None:
    rows = {row.id: row for row in judged(make, tmp_path)}
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
    assert report.noise is not None
    assert report.noise.kl_max == pytest.approx(0, abs=1e-9)
    assert report.noise.tokens == sum(rows[f"s{i}"].scored_tokens for i in range(4))  # the scored texts are repeated
    assert report.overall.fidelity.tokens == sum(row.scored_tokens for row in rows.values())


def test_the_limit_of_an_answer_does_not_depend_on_which_words_are_scored(tmp_path: Path) -> None:
    rambling = [replace(sample, reference="x" * 99) if sample.id in RESCORED else sample for sample in SAID]
    measure_baseline(lambda: fake_engine(SAID), SAMPLES, tmp_path / "baseline", config=CONFIG)
    evaluate(lambda: fake_engine(rambling), SAMPLES, tmp_path / "baseline", tmp_path / "report", config=CONFIG)
    said = {row.id: row.candidate_generation for row in load_rows(tmp_path / "report")}
    assert {name: len(said[name] or "") for name in RESCORED} == dict.fromkeys(RESCORED, len("The code is 00.") + 1 + 4)


def test_a_baseline_that_is_interrupted_while_its_own_words_are_scored_goes_on_with_them(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    measure_baseline(lambda: sharing_engine(SAID), SAMPLES, whole, config=CONFIG)

    def power_cut(label: str, done: int, total: int) -> None:
        if "own answers" in label and len(RESCORED["s1"]) * 2 < done < total:  # s1 has ended
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        measure_baseline(lambda: sharing_engine(SAID), SAMPLES, resumed, config=CONFIG, progress=power_cut)
    folders = {len(list(folder.glob("*.safetensors"))) for folder in (resumed / "unfinished").iterdir()}
    assert folders == {len(SAMPLES), 1}
    measure_baseline(lambda: sharing_engine(SAID), SAMPLES, resumed, config=CONFIG)
    for name in ("logprobs.safetensors", "answers.jsonl", "statistics.safetensors"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert read_round(resumed).record.right_answers == RESCORED
    assert not (resumed / "unfinished").exists()
