"""The betting test behind the gates, checked by hand and by simulation: error levels, bounds, ranges and document means.

The gates on distances also judge the KLs of real KV caches.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.verdicts.reports import GATES, at_most, lines, report, row
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from benchmarks.gate_shapes import load
from benchmarks.gates import SOUND_KL
from stages.verdict import bets
from stages.verdict.bets import Array, Mean, log_score
from stages.verdict.figures import means

RUNS = 2000
LIMIT = 0.05
CUT = bets.OUTLIER * LIMIT


def two_points(rng: np.random.Generator, documents: int, high: float) -> Array:
    """Return documents whose expected mean is LIMIT: most have 0, the others `high`."""
    return np.where(rng.random((RUNS, documents)) < LIMIT / high, high, 0.0)


@pytest.mark.parametrize(
    ("fails", "high"), [*((False, high) for high in (0.0501, 0.08, CUT)), *((True, high) for high in (0.0501, 0.5, 5.0, 500.0))]
)
def test_a_mean_at_its_limit_is_decided_at_most_at_the_error_level(fails: bool, high: float) -> None:
    mean = Mean(two_points(np.random.default_rng(int(fails)), 120, high), LIMIT)
    gains, stakes = (mean.fail_gains, bets.FAIL_STAKES) if fails else (mean.pass_gains, bets.PASS_STAKES)
    wrong = np.logical_or.reduce([log_score(gains(LIMIT)[:, :n], stakes) >= -math.log(0.05) for n in range(1, 121)])
    assert wrong.mean() <= at_most(0.05, RUNS)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(0, 0.4), min_size=2, max_size=60), level=st.sampled_from([0.05, 0.01]))
def test_the_bound_is_the_nearest_rejected_limit(values: list[float], level: float) -> None:
    mean = Mean(np.array(values), LIMIT)
    result = mean.test(level, level)
    stakes: tuple[float, ...]
    if result.decision == "FAIL":
        assert LIMIT <= result.bound <= result.value
        rejected, stakes = mean.fail_gains, bets.FAIL_STAKES
    else:
        assert result.value <= result.bound <= mean.cap
        assert (result.decision == "PASS") == (log_score(mean.pass_gains(LIMIT), bets.PASS_STAKES) >= -math.log(level))
        rejected, stakes = mean.pass_gains, bets.PASS_STAKES
    if LIMIT < result.bound < mean.cap or (result.decision == "PASS" and result.bound < LIMIT):
        assert log_score(rejected(result.bound), stakes) >= -math.log(level) - 1e-6


def test_a_document_outside_of_the_range_ends_only_its_stake() -> None:
    values = np.array([0.0] * 40 + [0.2])
    large_stake = log_score(Mean(values, LIMIT, worst=0.1, uncapped=True).pass_gains(LIMIT), (1.0,))
    assert large_stake == -math.inf
    both = log_score(Mean(values, LIMIT, worst=0.1, uncapped=True).pass_gains(LIMIT), bets.UNCAPPED_STAKES)
    assert both == pytest.approx(40 * math.log(1.15) + math.log(1 - 0.15 * 3) - math.log(2))


@pytest.mark.parametrize("values", [[0.0] * 100 + [math.nan], [0.0] * 100 + [math.inf], [1e308] * 100, []])
def test_a_mean_that_is_not_finite_fails(values: list[float]) -> None:
    assert Mean(np.array(values), LIMIT).test(1e-9, 0.05).decision == "FAIL"


def test_needed_documents_suffice_for_a_decision() -> None:
    rng = np.random.default_rng(2)
    for center in (0.02, 0.1):
        few = Mean(np.abs(rng.normal(center, 0.03, 6)), LIMIT)
        more = few.needed_documents(0.001, 10_000)
        assert 6 < more < 500
        decided = [Mean(rng.choice(few.values, more), LIMIT).test(0.001, 0.001).decision for _ in range(50)]
        assert sum(decision is not None for decision in decided) >= 40
    assert Mean(np.full(9, LIMIT), LIMIT).needed_documents(0.05, 777) == 777


@pytest.mark.parametrize(("documents", "uncapped"), [(20, False), (bets.MIN_T_DOCUMENTS, True)])
def test_simulated_runs_are_decided_like_single_tests(documents: int, uncapped: bool) -> None:
    drawn = np.random.default_rng(6).exponential(np.linspace(0.01, 0.15, 80)[:, None], (80, documents))
    runs = Mean(drawn, LIMIT, best=-CUT, worst=2 * LIMIT if uncapped else None, uncapped=uncapped)
    single = [replace(runs, values=run).test(0.01, 0.01, 0.01).decision for run in drawn]
    together = np.select([runs.fails(0.01), runs.passes(0.01, 0.01)], ["FAIL", "PASS"], "")
    assert [decision or "" for decision in single] == together.tolist()
    assert set(single) == {"PASS", "FAIL", None}
    assert uncapped == bool((runs.passes(0.01, 0.01) & ~runs.passes(0.01)).any()), "only MIN_T_DOCUMENTS allow Student's t"


def test_students_t_corrects_only_for_skewed_values() -> None:
    even = np.array([-1.0, 1.0] * 20)
    plain = float(even.std(ddof=1)) / math.sqrt(40) * float(student.isf(0.01, 39))
    assert bets.skewed_upper_bound(even, 0.01) == pytest.approx(plain)
    losses = np.random.default_rng(0).exponential(size=(4000, 40))
    wrong = (bets.skewed_upper_bound(losses, 0.01) < 1).mean()
    mean, errors = losses.mean(axis=1), losses.std(axis=1, ddof=1) / math.sqrt(40)
    assert wrong < 0.02 < (mean + student.isf(0.01, 39) * errors < 1).mean()
    assert bets.skewed_upper_bound(np.full(40, 0.3), 0.01) == pytest.approx(0.3)


def test_means_weight_documents_and_totals_weight_samples_equally() -> None:
    documents = ["a", "a", "a", "b"]
    rows: Any = [SimpleNamespace(document=name) for name in documents]
    assert means(rows, [1.0, 1.0, 4.0, 0.0]) == pytest.approx([2.0, 0.0])
    assert bets.document_totals([1.0, 1.0, 4.0, 0.0], documents).mean() == pytest.approx(1.5)
    assert math.isnan(means(rows[2:], [None, 1.0])[0])


SHAPES = load()
EMPTY = report([])
DISTANCES = ("max_mean_kl", "min_top10_overlap", "max_ruined_share", "max_far_token_share")


def test_only_sound_policies_pass_all_gates_on_distances() -> None:
    for model, policy in {(shape.model, shape.policy) for shape in SHAPES}:
        rows = [
            row(
                shape.workload,
                i,
                document=f"d{document}",
                mean_kl=shape.values["mean_kl"][i],
                scored_tokens=int(shape.values["scored_tokens"][i]),
                context_tokens=int(shape.values["context_tokens"][i]),
                candidate_nll=0.3 + shape.values["nll_difference"][i],
                top10_overlap=shape.values["top10_overlap"][i],
            )
            for shape in SHAPES
            if (shape.model, shape.policy) == (model, policy)
            for i, document in enumerate(shape.documents)
        ]
        checks = [check for key in DISTANCES for check in lines(key, EMPTY, rows)]
        statuses = {check.status for check in checks}
        if policy in SOUND_KL:
            assert statuses == {"PASS"}, (model, policy, [c.reason for c in checks if c.status != "PASS"])
        else:
            assert statuses - {"PASS"}, (model, policy)


def test_ruined_requests_at_the_limit_pass_in_at_most_5_percent() -> None:
    rng, samples = np.random.default_rng(5), 160
    sound, ruined = ([row("copy", i, mean_kl=kl) for i in range(samples)] for kl in (0.001, 5.0))
    wrong = 0
    for _ in range(100):
        drawn = rng.random(samples) < GATES.max_ruined_share
        (check,) = lines("max_ruined_share", EMPTY, [(ruined if bad else sound)[i] for i, bad in enumerate(drawn)])
        wrong += check.status == "PASS"
    assert wrong / 100 <= at_most(0.05, 100)


def test_a_capped_mean_is_labelled() -> None:
    for kl, text in ((0.001, "mean KL 0.003328 with documents capped at 0.15 (0.06348 without the cap)"), (4.0, "mean KL 4, ")):
        (line,) = lines("max_mean_kl", EMPTY, [row("copy", n, mean_kl=kl if n else 4.0) for n in range(64)])
        assert text in line.reason
