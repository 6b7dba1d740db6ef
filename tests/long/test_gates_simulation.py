"""The error rates of an evaluation in rounds, by evaluations that are drawn and judged by `decide` round by round.

Each draws four workloads of 160 samples, takes a round at a time and stops where `is_final` says so. To be quick, the gates on
distances are asked once for each number of rows, because those are the same in every draw.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from gate_reports import GATES, report, row

from benchmarks.gate_characteristics import CASES, HARMLESS, Rates, Rule, holm_for_pass, main, sequential
from pipeline.statistics import paired
from pipeline.verdict import gates
from pipeline.verdict.gates import Gates, decide, is_final
from pipeline.verdict.registry import Evidence, Gate
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Check

PLAN = (0.1, 0.25, 0.5, 0.75, 1.0)
SAMPLES = 160
RUNS = 500
ENDS = [math.ceil(round(share * SAMPLES, 9)) for share in PLAN]
NAMES = ("copy", "multi_turn", "retrieval", "tool_call")


@cache
def sample(workload: str, index: int, before: bool, after: bool) -> SampleRow:
    last = next(number for number, end in enumerate(ENDS, 1) if index < end)
    return row(workload, index, before, after, round=last)


@cache
def report_of(samples: int) -> EvaluationReport:
    return report([], samples=samples, planned_rounds=list(PLAN))


@pytest.fixture(autouse=True)
def _pure_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(gate: Gate) -> Gate:
        known: dict[tuple[int, int], list[Check]] = {}

        def check(evidence: Evidence, limits: Gates) -> list[Check]:
            key = len(evidence.rows), evidence.look.number  # as many rows have the same distances
            if key not in known:
                known[key] = list(gate.check(evidence, limits))
            return known[key]

        return replace(gate, check=check)

    some = [replace(gate, needed=None, detectable=None) for gate in gates.GATES if "complete" not in gate.lines]
    monkeypatch.setattr(gates, "GATES", [gate if "accuracy" in gate.lines else kept(gate) for gate in some])
    monkeypatch.setattr(paired, "difference_bound", lambda *_: 0.0)  # of the texts only


def evaluate(rng: np.random.Generator, case: Sequence[Rates]) -> tuple[str, float]:
    """Draw an evaluation, stop it once it is decided, and return its verdict and the share of the samples that it took."""
    drawn = [
        [
            sample(name, i, change != 1, change != 0)
            for i, change in enumerate(rng.choice(3, SAMPLES, p=[rates.lost, rates.gained, 1 - rates.lost - rates.gained]))
        ]
        for name, rates in zip(NAMES, case, strict=True)
    ]
    for share, end in zip(PLAN, ENDS, strict=True):
        rows = [r for workload in drawn for r in workload[:end]]
        judged = report_of(len(rows))
        outcome = decide(judged, rows, GATES)
        if is_final(outcome, judged, GATES):
            return outcome.status, share
    raise AssertionError("the last look is final")


def simulate(case: Sequence[Rates], runs: int = RUNS) -> tuple[Counter[str], float, float]:
    """Return how often each verdict was given, the mean share of the samples, and the share that ended in round 1."""
    rng = np.random.default_rng(20_261_122)
    results = [evaluate(rng, case) for _ in range(runs)]
    shares = [share for _, share in results]
    return Counter(status for status, _ in results), sum(shares) / runs, shares.count(PLAN[0]) / runs


def at_most(rate: float, runs: int = RUNS) -> float:
    """The most of `runs` that a true rate gives, but for one time in a thousand."""
    return runs * rate + 3.1 * math.sqrt(runs * rate * (1 - rate))


def test_one_workload_at_the_margin_passes_in_at_most_5_percent() -> None:
    """H0: one workload loses exactly the margin. The other three are harmless and nearly always pass."""
    verdicts, _, _ = simulate(CASES["one at the margin (5 % lost), the others harmless"])
    assert verdicts["PASS"] <= at_most(0.05)
    assert verdicts["PASS"] > 0, "the gates are not merely closed"


def test_workloads_that_all_lose_exactly_the_margin_fail_in_at_most_5_percent() -> None:
    """H0: every workload loses no more than the margin; here each loses all of it, where a wrong FAIL of any is likeliest."""
    verdicts, _, _ = simulate(CASES["all at the margin (5.5 % lost, 0.5 % gained)"])
    assert verdicts["FAIL"] <= at_most(0.05)


def test_a_harmless_engine_passes_in_at_least_90_percent_and_takes_fewer_samples_than_all() -> None:
    verdicts, mean_share, _ = simulate([HARMLESS] * 4)
    assert verdicts["PASS"] >= 0.9 * RUNS
    assert verdicts["FAIL"] == 0
    assert mean_share < 0.9


def test_a_broken_engine_fails_after_the_first_tenth() -> None:
    verdicts, _, first = simulate(CASES["all lose 60 %"], runs=200)
    assert verdicts == {"FAIL": 200}
    assert first >= 0.97


def test_the_drawn_evaluations_agree_with_the_exact_probabilities() -> None:
    case = CASES["1 % lost, 1 % gained"]
    exact = sequential(case, SAMPLES, Rule(PLAN))
    runs = 300
    verdicts, mean_share, _ = simulate(case, runs)
    assert verdicts["PASS"] / runs == pytest.approx(exact.passes, abs=3.3 * math.sqrt(exact.passes * (1 - exact.passes) / runs))
    assert mean_share == pytest.approx(exact.mean_share, abs=0.03)


@pytest.mark.parametrize("samples", [60, 160])
def test_no_rate_of_flips_at_the_margin_lets_more_than_5_percent_pass_or_fail(samples: int) -> None:
    """By exact probabilities: whole numbers of flips cross a boundary more rarely than the normal distribution of the looks."""
    for gained in (0.0, 0.005, 0.02):
        outcome = sequential([Rates(GATES.margin + gained, gained)], samples, Rule(PLAN))
        assert outcome.passes <= GATES.alpha
        assert outcome.fails <= GATES.alpha


def test_holms_procedure_for_a_pass_costs_power_and_one_workload_has_none_of_it() -> None:
    one_look = Rule((1.0,))
    assert holm_for_pass([HARMLESS] * 4, 70).passes < sequential([HARMLESS] * 4, 70, one_look).passes
    assert holm_for_pass([HARMLESS], 70).passes == pytest.approx(sequential([HARMLESS], 70, one_look).passes)


def test_the_benchmark_prints_a_line_for_each_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--samples", "40", "--rounds", "0.5,1"])
    printed = capsys.readouterr().out
    assert "| candidate | one look, Holm for PASS | one look | 2 looks |" in printed
    assert all(f"\n| {name} |" in printed for name in CASES)
