"""The gate on answers where samples share documents, by evaluations that are drawn."""

import math

import numpy as np
import pytest
from test_gates_distances import at_most

from benchmarks.gate_clusters import HARMLESS, KINDS, Kind, drawn, judged
from pipeline.statistics.bounds import EVENT_CORRELATION
from pipeline.statistics.paired import Pairs, effective_pairs, inferiority_p, noninferiority_p

RUNS = 600
PLAN = [0.1, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_flips_have_the_rates_and_the_correlation_that_were_asked_for(kind: Kind) -> None:
    flips = drawn((300, 40, 4), (0.055, 0.005), 0.3, kind)
    lost = (flips < 0).astype(float)
    assert lost.mean() == pytest.approx(0.055, abs=0.006)
    assert (flips > 0).mean() == pytest.approx(0.005, abs=0.002)
    residual = lost - lost.mean()
    assert (residual[:, :, 0] * residual[:, :, 1]).mean() / lost.var() == pytest.approx(0.3, abs=0.06)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [[1.0], PLAN])
def test_documents_whose_flips_correlate_pass_and_fail_wrongly_in_at_most_5_percent(kind: Kind, shares: list[float]) -> None:
    passes, fails = judged(drawn((RUNS, 40, 4), (0.055, 0.005), EVENT_CORRELATION, kind), shares)
    assert passes <= at_most(0.05, RUNS)
    assert fails <= at_most(0.05, RUNS)


@pytest.mark.parametrize("shares", [[1.0], PLAN])
def test_a_harmless_candidate_of_forty_documents_of_four_passes_nine_times_in_ten(shares: list[float]) -> None:
    assert judged(drawn((RUNS, 40, 4), HARMLESS, 0.0, "whole documents"), shares)[0] >= 0.9


def test_counts_that_are_not_whole_lie_between_whole_ones() -> None:
    for test in (noninferiority_p, inferiority_p):
        few, between, many = (test(Pairs(110, lost, 1.0), 0.05) for lost in (1, 1.5, 2))
        assert between == pytest.approx(math.sqrt(few * many))
        gains = [test(Pairs(110, 2.0, gained), 0.05) for gained in (0, 0.25, 1)]
        assert sorted(gains, reverse=test is noninferiority_p) == gains


def test_documents_that_flip_as_a_whole_in_all_of_their_samples_have_a_p_value_too() -> None:
    everything = effective_pairs([-1] * 12, [f"d{i // 4}" for i in range(12)])
    assert everything.lost == everything.n
    half = effective_pairs([-1] * 6 + [1] * 5, [f"d{i // 2}" for i in range(11)])
    assert half.lost + half.gained <= half.n + 1e-9
    for pairs in (everything, half):
        assert np.isfinite([noninferiority_p(pairs, 0.05), inferiority_p(pairs, 0.05)]).all()
