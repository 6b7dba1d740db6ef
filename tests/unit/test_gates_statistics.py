"""The statistics behind the gates: against the literature's numbers, by simulation, and by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.statistics.bootstrap import resampled_sums
from pipeline.statistics.bounds import EVENT_CORRELATION
from pipeline.statistics.paired import (
    EXACT_LIMIT,
    Pairs,
    difference_bound,
    effective_pairs,
    holm_levels,
    inferiority_p,
    noninferiority_p,
)


@pytest.mark.parametrize("n", [59, 90, 128])
def test_zero_flips_are_never_more_convincing_than_the_exact_bound_allows(n: int) -> None:
    assert noninferiority_p(Pairs(n, 0, 0), 0.05) >= 0.95**n


def _multinomial(n: int, lost: int, gained: int, p_lost: float, p_gained: float) -> float:
    rest = n - lost - gained
    ways = math.comb(n, lost) * math.comb(n - lost, gained)
    return ways * p_lost**lost * p_gained**gained * (1 - p_lost - p_gained) ** rest


@pytest.mark.parametrize("margin", [0.05, 0.1])
def test_the_exact_test_keeps_its_level_over_every_true_rate(margin: float) -> None:
    """The size, summed over all outcomes, of the rule `p <= 0.05` where the candidate is just inferior, and beyond."""
    n = 50
    outcomes = [(c, b) for c, b in itertools.product(range(n + 1), repeat=2) if b + c <= n and c <= 12]
    passing = [(c, b) for c, b in outcomes if noninferiority_p(Pairs(n, c, b), margin) <= 0.05]
    assert passing
    for p_gained, extra in itertools.product((0.0, 0.003, 0.01, 0.03, 0.1, 0.2, 0.35), (0.0, 0.02)):
        p_lost = p_gained + margin + extra
        size = sum(_multinomial(n, c, b, p_lost, p_gained) for c, b in passing)
        assert size <= 0.05 + 1e-6, (p_gained, size)


@pytest.mark.parametrize(("n", "p_gained"), [(97, 0.0), (128, 0.01), (128, 0.05), (1000, 0.02)])
def test_type_one_error_and_coverage_by_simulation(n: int, p_gained: float) -> None:
    rng = np.random.default_rng(1)
    draws = 1500
    margin = 0.05
    counts = rng.multinomial(n, [p_gained + margin, p_gained, 1 - 2 * p_gained - margin], size=draws)
    pairs = [Pairs(n, int(c), int(b)) for c, b, _ in counts]
    wrongly_passed = np.mean([noninferiority_p(p, margin) <= 0.05 for p in pairs])
    wrongly_failed = np.mean([inferiority_p(p, margin) <= 0.05 for p in pairs])
    allowed = 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)
    assert wrongly_passed <= allowed
    assert wrongly_failed <= allowed
    assert max(wrongly_passed, wrongly_failed) > 0.01  # not so careful that nothing is ever decided


@pytest.mark.parametrize("pairs", [Pairs(96, 0, 0), Pairs(96, 11, 1), Pairs(128, 2, 1), Pairs(40, 0, 5), Pairs(900, 30, 9)])
def test_bounds_are_the_inversion_of_the_tests(pairs: Pairs) -> None:
    lower, upper = difference_bound(pairs, 0.05, lower=True), difference_bound(pairs, 0.05, lower=False)
    assert lower < pairs.difference < upper or lower <= pairs.difference <= upper
    assert noninferiority_p(pairs, -(lower - 0.002)) <= 0.05 < noninferiority_p(pairs, -(lower + 0.002))
    assert inferiority_p(pairs, -(upper + 0.002)) <= 0.05 < inferiority_p(pairs, -(upper - 0.002))


def test_the_bound_without_flips_is_the_rule_of_three() -> None:
    assert difference_bound(Pairs(96, 0, 0), 0.05, lower=True) == pytest.approx(-(1 - 0.05 ** (1 / 96)), abs=2e-4)


def test_exact_and_asymptotic_tests_agree_where_they_meet() -> None:
    for lost, gained in ((12, 4), (25, 10), (40, 2)):
        exact = noninferiority_p(Pairs(EXACT_LIMIT, lost, gained), 0.05)
        asymptotic = noninferiority_p(Pairs(EXACT_LIMIT + 1, lost, gained), 0.05)
        assert exact == pytest.approx(asymptotic, abs=0.02)


@settings(max_examples=40, deadline=None)
@given(n=st.sampled_from([60, 128]), lost=st.integers(0, 20), gained=st.integers(0, 10))
def test_losing_more_is_never_better(n: int, lost: int, gained: int) -> None:
    now, worse = Pairs(n, lost, gained), Pairs(n, lost + 1, gained)
    assert noninferiority_p(worse, 0.05) >= noninferiority_p(now, 0.05)
    assert inferiority_p(worse, 0.05) <= inferiority_p(now, 0.05)


def test_holm_spends_alpha_step_by_step_and_stops() -> None:
    assert holm_levels([0.03, 0.001, 0.02], 0.06, float) == pytest.approx([0.06, 0.02, 0.03])
    assert holm_levels([0.5, 0.001, 0.4], 0.05, float) == pytest.approx([0.0, 0.05 / 3, 0.025])


def test_holm_tests_each_hypothesis_at_the_looks_level_of_its_share() -> None:
    assert holm_levels([0.03, 0.001, 0.004], 0.06, lambda alpha: alpha / 10) == pytest.approx([0.0, 0.002, 0.003])


def test_independent_samples_keep_their_counts() -> None:
    assert effective_pairs([-1, 0, 1, 0], ["a", "b", "c", "d"]) == Pairs(4, 1, 1)


def test_documents_without_flips_count_by_the_correlation_that_is_assumed() -> None:
    together = effective_pairs([0] * 160, [f"d{i // 4}" for i in range(160)])
    assert together == Pairs(int(160 / (1 + 3 * EVENT_CORRELATION)), 0, 0)


def test_flips_that_come_by_documents_count_ever_less_the_more_of_them_there_are() -> None:
    def effective(flipped: int, documents: int) -> float:
        flips = [-1] * (4 * flipped) + [0] * (4 * (documents - flipped))
        return 4 * documents / effective_pairs(flips, [f"d{i // 4}" for i in range(4 * documents)]).n

    assert effective(0, 40) < effective(4, 40) < effective(40, 400) < 4
    assert effective(200, 2000) == pytest.approx(4, rel=0.06), "where whole documents flip, a sample is worth a quarter"


def test_many_flips_that_ignore_their_documents_count_almost_fully() -> None:
    rng = np.random.default_rng(0)
    flips = (-(rng.random(800) < 0.2).astype(int)).tolist()
    spread = effective_pairs(flips, [f"d{i // 4}" for i in range(800)])
    assert 650 <= spread.n <= 800


def test_bootstrap_by_document_has_the_variance_of_documents() -> None:
    rng = np.random.default_rng(0)
    level = np.repeat(rng.normal(size=50), 4)
    values = level[:, None]
    by_document = resampled_sums(values, [str(i // 4) for i in range(200)])[:, 0] / 200
    by_sample = resampled_sums(values, [str(i) for i in range(200)])[:, 0] / 200
    assert by_document.std() == pytest.approx(level.std() / math.sqrt(50), rel=0.15)
    assert by_sample.std() == pytest.approx(level.std() / math.sqrt(200), rel=0.15)
