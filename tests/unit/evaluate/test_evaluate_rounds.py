"""Rounds: the samples of each round, and the report that joins the rounds."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from helpers.engines.fake import CharTokenizer, FakeEngine, fake_engine
from helpers.verdicts.evaluations import (
    SAMPLES,
    brief_workloads,
    evaluate,
    joined,
    measure_baseline,
    measure_candidate,
    samples,
)

from stages.core.records import Sample
from stages.evaluate.inputs.samples import assign_rounds
from stages.evaluate.inputs.tokens import encode_rounds, read_encoded, workloads_digest, write_encoded
from stages.verdict.report import load_rows

SHARES = [0.1, 0.25, 0.5, 0.75, 1.0]


def strata(chosen: list[Sample]) -> Counter[tuple[str, str]]:
    return Counter((sample.workload, sample.difficulty) for sample in chosen)


def test_every_workload_and_difficulty_is_divided_by_the_shares() -> None:
    graded = [replace(s, difficulty=("easy", "hard")[i % 2]) for i, s in enumerate(samples(160))]
    rounds = assign_rounds(graded, SHARES)
    assert sorted(s.id for r in rounds for s in r) == sorted(s.id for s in graded)
    ran: Counter[tuple[str, str]] = Counter()
    for chosen, share in zip(rounds, SHARES, strict=True):
        ran += strata(chosen)
        for stratum, count in strata(graded).items():
            assert abs(ran[stratum] - share * count) <= 2, (stratum, share)


def test_documents_are_not_split_in_any_order_of_samples() -> None:
    questions = [replace(s, document=f"d{i // 4}") for i, s in enumerate(samples(200))]
    rounds = assign_rounds(questions, SHARES)
    owners = [{s.cluster for s in chosen} for chosen in rounds]
    assert sum(map(len, owners)) == len({s.cluster for s in questions})
    assert abs(len(rounds[0]) - 0.1 * len(questions)) <= 4
    again = assign_rounds(questions[::-1], SHARES)
    assert [{s.id for s in chosen} for chosen in again] == [{s.id for s in chosen} for chosen in rounds]
    assert all([s.id for s in chosen] == [s.id for s in questions if s in chosen] for chosen in rounds)


def test_a_round_without_samples_is_left_out() -> None:
    stories = samples(1)[2:5]
    rounds = assign_rounds(stories, SHARES)
    assert [len(chosen) for chosen in rounds] == [1, 1, 1]
    assert assign_rounds(SAMPLES, [1.0]) == [SAMPLES]
    many = samples(400)
    one_document = [replace(s, document="all") if i < 795 else s for i, s in enumerate(many)]
    for shares in (SHARES, [0.5, 1.0], [0.001, 0.002, 1.0], [0.5, 0.999, 1.0]):
        for questions in (many, one_document):
            divided = assign_rounds(questions, shares)
            assert all(divided)
            assert sorted(s.id for chosen in divided for s in chosen) == sorted(s.id for s in questions)


def test_the_first_round_has_15_questions_of_each_workload() -> None:
    for count, first in ((3, 3), (15, 15), (20, 15), (60, 15), (300, 30)):
        counts = Counter(sample.workload for sample in assign_rounds(samples(count), SHARES)[0])
        assert abs(counts["find"] - first) <= 1
        assert min(counts["find"], counts["copy"]) >= min(15, count)


def test_joined_rounds_give_the_report_of_one_round(tmp_path: Path) -> None:
    def engine() -> FakeEngine:
        return fake_engine(questions, wrong=["find-1", "copy-5"], noise=0.5)

    questions, shares = samples(20), [0.5, 1.0]
    config, rounds = brief_workloads(rounds=shares), assign_rounds(questions, shares)
    ordered = [sample for chosen in rounds for sample in chosen]
    stored = tmp_path / "baseline"
    measure_baseline(lambda: fake_engine(questions), ordered, stored)
    one_round = evaluate(engine, ordered, stored, tmp_path / "one")
    encoded = encode_rounds(questions, CharTokenizer(), config)
    write_encoded(encoded, tmp_path)
    assert read_encoded(tmp_path) == encoded
    measured = []
    for number, chosen in enumerate(rounds, start=1):
        base, candidate = tmp_path / f"b{number}", tmp_path / f"c{number}"
        measure_baseline(lambda: fake_engine(questions), chosen, base, config=config)
        measure_candidate(engine, chosen, base, candidate, config=config)
        measured.append((base, candidate))
        evaluation = joined(encoded, measured, config)
        assert evaluation.report.samples == sum(map(len, rounds[:number]))
        assert evaluation.report.workloads_digest == workloads_digest(encoded)
        assert evaluation.report.planned_bins == one_round.planned_bins == 2, "the prompts of one workload fill two bins"
    assert evaluation.report.slices == one_round.slices
    assert evaluation.report.planned_rounds == len(rounds)
    expected = [(s.id, n) for n, chosen in enumerate(rounds, start=1) for s in chosen]
    assert [(row.id, row.round) for row in evaluation.rows] == expected
    assert [row.model_copy(update={"round": 1}) for row in evaluation.rows] == load_rows(tmp_path / "one")
