"""The verdict: which gate gives FAIL or INCONCLUSIVE instead of PASS. Missing or noisy data never pass.

Each case lists all gates that stop a PASS. A fault that only one gate stops would pass without that gate.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.verdicts.reports import (
    CLASSES,
    FAILED_STRESS,
    GATES,
    LARGER_POOL,
    SOUND_ENGINE,
    answered,
    compared,
    conformance,
    drafted,
    engine_conformance,
    engine_tests,
    every_class,
    fidelity,
    gates,
    measured_once,
    prose,
    row,
    verdict,
)

from stages.verdict.bets import OUTLIER
from stages.verdict.report import SampleRow
from stages.verdict.verdict import Check, Gate, Verdict

Rows = list[SampleRow]


def copies(count: int = 128, **values: Any) -> Rows:
    """Return rows of four workloads; `copy` has `count` rows with the given values."""
    return [r for r in every_class() if r.workload != "copy"] + answered("copy", count, **values)


def change_every(count: int, **values: Any) -> Rows:
    """Return rows of all workloads, and change every `count`-th row."""
    return [r.model_copy(update=values) if i % count == 0 else r for i, r in enumerate(every_class())]


def change_first(count: int, **values: Any) -> Rows:
    """Return rows of all workloads, and change the first `count` rows across workloads."""
    rows = sorted(every_class(), key=lambda r: r.id[::-1])
    return [r.model_copy(update=values) if i < count else r for i, r in enumerate(rows)]


def with_kl(*values: float) -> Rows:
    return [r.model_copy(update={"mean_kl": values[i % len(values)]}) for i, r in enumerate(every_class())]


def spread_over_documents(rows: Rows, count: int) -> Rows:
    """Return the rows spread over `count` documents per workload."""
    return [r.model_copy(update={"document": f"{r.workload}-{i % count}"}) for i, r in enumerate(rows)]


def pages(count: int) -> Rows:
    """Return rows with one question of each kind about each of `count` pages."""
    return [r.model_copy(update={"document": f"page-{i}"}) for i in range(count) for r in (row(name, i) for name in CLASSES)]


def with_recovery(share: float, baseline: float = 0.25) -> Rows:
    changes = {"baseline_probability": baseline, "candidate_probability": share * baseline}
    return [r.model_copy(update=changes) for r in every_class()]


def with_lost_answers(count: int, rows: Rows) -> Rows:
    return [r.model_copy(update={"candidate_correct": i >= count}) for i, r in enumerate(rows)]


NEVER: dict[str, Any] = {"baseline_probability": 1e-3, "candidate_probability": 1e-3}
HOPELESS = [*answered("retrieval", 160), *answered("tool_call", 160, **NEVER)]
WITHIN_A_BIN = [
    r.model_copy(update={"context_tokens": 100 if i < 25 else 900, "candidate_correct": i >= 12})
    for i, r in enumerate(answered("retrieval", 128))
]
OPEN_MEANS = "max_mean_kl min_top10_overlap"
FAR_APART = [*prose(1), prose(2, context_tokens=1100, mean_kl=0.04)[1]]
BLIND = answered("retrieval", 8)
UNDRAFTED = [r if i else r.model_copy(update={"acceptance": {}}) for i, r in enumerate(drafted(every_class(), 25))]


@dataclass(frozen=True)
class GateCase:
    """Samples, and the verdict that follows from them."""

    rows: Rows
    status: str = "PASS"
    stops: str = ""
    """Gates that stop a PASS, separated by spaces."""
    reason: str = ""
    """Part of the first reason."""
    gates: dict[str, Any] = field(default_factory=dict)
    """Changes of the thresholds."""
    report: dict[str, Any] = field(default_factory=dict)
    """Changes of the report."""


OPEN = "min_recovery max_ruined_share"
CASES = {
    "no answer flips": GateCase(
        every_class(), reason="all: keeps 100.0 % of the probability of right answers (at least 99.9 %)"),
    "2 of 60 answers are lost": GateCase(with_lost_answers(2, pages(15))),
    "answers are lost while every distribution stays close": GateCase(
        every_class(retrieval=25), "FAIL", "accuracy",
        "retrieval: 25 of 128 answers lost, 0 gained; accuracy 0.805 vs 1.000, change -0.1953, 99.83 % bound -0.0"),
    "15 pages of four questions": GateCase(pages(15)),
    "14 pages of four questions": GateCase(pages(14), "INCONCLUSIVE", OPEN, "14 documents, gates.min_samples is 15"),
    "59 questions": GateCase(pages(15)[:59], "INCONCLUSIVE", OPEN),
    "questions that the baseline cannot answer": GateCase(
        HOPELESS, "INCONCLUSIVE", "min_recovery", "0.001, is below gates.min_baseline_prob"),
    "no minimum of the baseline's probability": GateCase(HOPELESS, gates={"min_baseline_probability": 0.0}),
    "samples of few documents": GateCase(spread_over_documents(every_class(), 8), "INCONCLUSIVE", f"min_recovery {OPEN_MEANS}"),
    "lost probability": GateCase(with_recovery(0.9), "FAIL", "min_recovery", "all: keeps 90.0 %"),
    "lost probability in one workload": GateCase(
        copies(baseline_probability=0.05, candidate_probability=0.035), "FAIL", "min_recovery", "copy: keeps 70.0 %"),
    "a workload at its limit": GateCase(
        copies(baseline_probability=0.05, candidate_probability=0.04), "INCONCLUSIVE", "min_recovery", "copy: keeps 80"),
    "one page of 15 that loses everything": GateCase(
        [*pages(15)[:-4], *(r.model_copy(update={"candidate_probability": 0.0}) for r in pages(15)[-4:])],
        "INCONCLUSIVE", "min_recovery"),
    "a missing probability": GateCase(change_every(512, candidate_probability=None), "FAIL", "min_recovery", "nan %"),
    "a baseline with probability 0": GateCase(
        with_recovery(1.0, baseline=0.0), "INCONCLUSIVE", "min_recovery", "below gates.min_baseline_probability"),
    "a context bin": GateCase([*every_class()[128:], *WITHIN_A_BIN], "FAIL", "accuracy", "retrieval [0, 150): 12 of 25"),
    "a higher KL in one workload": GateCase(copies(mean_kl=0.15), "FAIL", "max_mean_kl", "outside max_mean_kl (at most 0.05)"),
    "a KL near the limit": GateCase(with_kl(0.09, 0.001), "INCONCLUSIVE", "max_mean_kl", "not clearly within"),
    "a low top-10 overlap": GateCase(copies(top10_overlap=0.5), "FAIL", "min_top10_overlap", "(at least 0.8)"),
    "every tenth request is ruined": GateCase(change_every(10, mean_kl=0.3), "FAIL", "max_ruined_share"),
    "10 ruined requests": GateCase(
        change_first(10, mean_kl=9.0), "INCONCLUSIVE", "max_ruined_share",
        "all: requests with a mean KL above 0.15: 10 of 512, share by document 0.01953"),
    "40 ruined requests": GateCase(change_first(40, mean_kl=9.0), "FAIL", "max_ruined_share max_mean_kl"),
    "far tokens": GateCase(change_every(4, far_tokens=10), "FAIL", "max_far_token_share"),
    "answers and prose": GateCase(every_class() + prose(24)),
    "answers and broken prose": GateCase(every_class() + prose(3, mean_kl=3.0), "FAIL", "max_mean_kl"),
    "14 documents without answers": GateCase(
        prose(14), "INCONCLUSIVE", "min_samples",
        "all: no sample has an answer to judge, 14 documents have distances; gates.min_samples is 15",
        gates={"max_ruined_share": 0.3}),
    "two documents without answers": GateCase(
        FAR_APART, "INCONCLUSIVE", f"min_samples max_ruined_share {OPEN_MEANS}", "2 documents have distances"),
    "no samples": GateCase([], "FAIL", "complete", "all: no samples were evaluated"),
    **{f"a missing {name}": GateCase(change_every(512, **{name: None}), "FAIL", "complete",
                                     "1 of 128 samples lack a finite number")
       for name in ("mean_kl", "max_kl", "baseline_nll", "candidate_nll", "top1_agreement", "top10_overlap",
                    "candidate_correct")},
    "one request deviates from the reference engine": GateCase(
        every_class(), "FAIL", "conformance", "1 of 7 requests",
        report={
            "conformance": conformance(engine_conformance(*SOUND_ENGINE.requests, compared(stored=3e-3))),
            "tests": engine_tests(),
        }),
    "no stress test, since other thresholds failed the questions": GateCase(
        every_class(), "INCONCLUSIVE", "stress_test", "did not run", report={"tests": measured_once(stress=None)}),
    "no comparison with a reference engine": GateCase(
        every_class(), "INCONCLUSIVE", "conformance", "no engine was compared with its reference engine",
        report={"conformance": None}),
    "fewer samples than counted": GateCase(
        every_class(), "FAIL", "complete", "the report counts 513 samples", report={"samples": 513}),
    "a duplicate sample": GateCase([*every_class()[:-1], every_class()[0]], "FAIL", "complete"),
    "no sample of the first round": GateCase(
        change_every(1, round=2), "FAIL", "complete", "rounds 2 of 1 to 2; rounds start at 1", report={"planned_rounds": 2}),
    "a round without samples": GateCase(
        change_every(2, round=3), "FAIL", "complete", "has rounds 1, 3 of 1 to 3", report={"planned_rounds": 3}),
    "a round that was not planned": GateCase(change_every(2, round=2), "FAIL", "complete", "has rounds 1, 2 of 1 to 1"),
    "distances whose sum is not finite": GateCase(
        change_every(1, mean_kl=1e308, scored_tokens=1), "FAIL", "max_mean_kl max_ruined_share", "copy: mean KL nan"),
    "an unnoticed must-fail control": GateCase(
        every_class(), "FAIL", "must_fail_control", "the evaluation does not see the cache",
        report={"tests": measured_once(control=BLIND)}),
    "a must-fail control that did not run": GateCase(
        every_class(), "FAIL", "must_fail_control", "it did not run", report={"tests": measured_once(control=[])}),
    "noise of the baseline itself": GateCase(
        every_class(), "INCONCLUSIVE", "noise_floor", "max_mean_kl=0.05 is finer than the baseline's own noise",
        report={"baseline_tests": measured_once(noise=fidelity(kl_mean=0.06))}),
    "noise of the candidate itself": GateCase(
        every_class(), "INCONCLUSIVE", "noise_floor", "the candidate's own noise",
        report={"tests": measured_once(noise=fidelity(kl_mean=1.0))}),
    "noise of single tokens": GateCase(
        every_class(), "INCONCLUSIVE", "noise_floor",
        "far tokens, a KL of 1, is finer than the baseline's own noise (99.9th percentile of KL 1.5)",
        report={"baseline_tests": measured_once(noise=fidelity(kl_p999=1.5))}),
    "noise that was not measured": GateCase(
        every_class(), "INCONCLUSIVE", "noise_floor", report={"baseline_tests": measured_once(noise=None)}),
    "a failed stress test": GateCase(
        every_class(), "FAIL", "stress_test", "does not compute its policy: f", report={"tests": engine_tests(FAILED_STRESS)}),
    "a larger pool than the policy claims": GateCase(
        every_class(), "FAIL", "allocation", report={"tests": engine_tests(LARGER_POOL)}),
    "free answers that contradict forced decode": GateCase(
        every_class(), "FAIL", "free_answers", "sample a: ...", report={"tests": engine_tests(free=["sample a: ..."])}),
    "free answers that were not checked": GateCase(
        every_class(), "FAIL", "free_answers", "not checked", report={"tests": measured_once(free_answers=None)}),
    "a lost acceptance length": GateCase(
        drafted(every_class(), 34), "FAIL", "max_acceptance_loss", "loss of acceptance length 0.2647, 99.87 % bound 0.2",
        report={"drafters": ["lookup"]}),
    "an answer that was not drafted": GateCase(
        UNDRAFTED, "FAIL", "max_acceptance_loss", "retrieval, drafts by lookup", report={"drafters": ["lookup"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_verdict_lists_the_gates_that_stop_a_pass(name: str) -> None:
    case = CASES[name]
    outcome = verdict(case.rows, gates(**case.gates), **case.report)
    assert outcome.status == case.status
    assert {check.gate for check in outcome.checks if check.status in ("FAIL", "INCONCLUSIVE")} == set(case.stops.split())
    assert case.reason in outcome.reasons[0]
    worst = {check.reason for check in outcome.checks if check.status == case.status}
    assert case.status == "PASS" or set(outcome.reasons) == worst
    assert case.status == "INCONCLUSIVE" or outcome.samples_needed == 0


def line(outcome: Verdict, gate: str) -> Check:
    return next(check for check in outcome.checks if check.gate == gate)


def test_eight_lossless_documents_pass_and_seven_do_not() -> None:
    """The score is the mean of 2^n and 1.15^n and passes at 1 / 0.009. With Student's t, the level is 0.0135."""
    checks = {n: line(verdict(answered("copy", n), gates(min_samples=1)), "min_recovery") for n in (7, 8)}
    assert {n: check.status for n, check in checks.items()} == {7: "INCONCLUSIVE", 8: "PASS"}
    assert "the bound has 98.65 % certainty" in checks[8].reason


@pytest.mark.parametrize(("rows", "needed"), [(HOPELESS, 0), (prose(2), 60), (answered("copy", 20), 60)])
def test_samples_needed_is_unknown_if_the_model_cannot_answer(rows: Rows, needed: int) -> None:
    assert verdict(rows).samples_needed == needed


@pytest.mark.parametrize(
    ("rows", "gate"), [(change_every(100, far_tokens=10), "max_far_token_share"), (every_class() + prose(4), "max_mean_kl")]
)
def test_fail_only_gates_have_no_line_unless_they_fail(rows: Rows, gate: str) -> None:
    outcome = verdict(rows)
    assert (outcome.status, outcome.warnings) == ("PASS", [])
    assert not [check for check in outcome.checks if check.gate == gate and check.where in ("all", "prose")]


@pytest.mark.parametrize(("documents", "share"), [(60, "0.0683"), (15, "0.299")])
def test_60_sound_requests_pass_although_they_cannot_show_the_share(documents: int, share: str) -> None:
    rows = [row.model_copy(update={"document": f"page-{i % documents}"}) for i, row in enumerate(answered("copy", 60))]
    check = line(verdict(rows), "max_ruined_share")
    assert (check.status, check.threshold) == ("PASS", 0.025)
    clause = "60 requests without a ruined one are enough for a PASS, although {} documents show only a share of at most {} "
    assert clause.format(documents, share) + "(95.5 % bound), not max_ruined_share (0.025)" in check.reason


def test_ruined_requests_are_counted_by_raw_values() -> None:
    ruin = OUTLIER * GATES.max_mean_kl
    rows = [r.model_copy(update={"mean_kl": ruin + 1e-12 * (i % 100 < 50)}) for i, r in enumerate(every_class())]
    assert line(verdict(rows), "max_ruined_share").value == pytest.approx(262 / 512), "a KL at the limit is not ruined"


def test_one_more_lost_sample_never_improves_a_verdict() -> None:
    order = ["PASS", "FAIL"]
    samples = [answered("retrieval", 100, lost, context_tokens=900) for lost in range(31)]  # all in one context bin
    statuses = [verdict(rows).status for rows in samples]
    assert statuses == sorted(statuses, key=order.index)
    assert set(statuses) == set(order)
    fails = samples[statuses.index("FAIL")]
    assert verdict([*fails, row("retrieval", 100, after=False, context_tokens=900)]).status != "PASS"


TABLE_PAGE = (Path(__file__).resolve().parents[3] / "docs" / "gates.md").read_text(encoding="utf-8")


def test_the_table_of_the_documentation_lists_every_gate() -> None:
    table = TABLE_PAGE.partition("| gate | question | test | limit")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` (?:\|[^|]+){3}\|$", table, re.MULTILINE)
    assert rows == list(Gate)
