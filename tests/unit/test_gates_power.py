"""The power of the paired test and the numbers of samples that follow, against p-values one by one and against draws."""

import math

import numpy as np
import pytest

from pipeline.statistics.paired import EXACT_LIMIT, Pairs, inferiority_p, noninferiority_p
from pipeline.statistics.power import decision_power, rejected_up_to, samples_to_decide

MARGIN = 0.05


@pytest.mark.parametrize("level", [0.045, 0.0025, 6e-5])
@pytest.mark.parametrize("n", [16, 60, 160, EXACT_LIMIT + 1])
def test_the_boundary_is_where_the_p_value_crosses_the_level(n: int, level: float) -> None:
    gained = np.arange(4, dtype=np.float64)
    for count, most in enumerate(rejected_up_to(n, MARGIN, level, gained, for_pass=True)):
        assert most == -1 or noninferiority_p(Pairs(n, int(most), count), MARGIN) <= level
        assert noninferiority_p(Pairs(n, int(most) + 1, count), MARGIN) > level
    for count, most in enumerate(rejected_up_to(n, MARGIN, level, gained, for_pass=False)):
        assert most == -1 or inferiority_p(Pairs(n, int(most), count), MARGIN) > level
        assert most + count == n or inferiority_p(Pairs(n, int(most) + 1, count), MARGIN) <= level


def test_a_level_that_no_outcome_reaches_passes_and_fails_nothing() -> None:
    assert rejected_up_to(16, MARGIN, 1e-30, np.arange(3, dtype=np.float64), for_pass=True).tolist() == [-1, -1, -1]
    assert rejected_up_to(16, MARGIN, 1e-30, np.arange(3, dtype=np.float64), for_pass=False).tolist() == [16, 15, 14]


RATES = [(0.0, 0.0), (0.02, 0.0), (0.02, 0.01), (0.03, 0.0), (0.045, 0.01), (0.08, 0.0), (0.12, 0.02)]


@pytest.mark.parametrize(("lost", "gained"), RATES)
def test_the_advised_number_of_samples_decides_with_the_power_that_it_promises(lost: float, gained: float) -> None:
    """By draws and p-values, at the level of a second attempt's PASS, or of a FAIL among four kinds of work."""
    for_pass = lost - gained < MARGIN
    level = 0.0025 if for_pass else 0.0125
    n = samples_to_decide(lost, gained, MARGIN, level, 0.9, 1_000_000)
    test = noninferiority_p if for_pass else inferiority_p
    runs = 4000
    drawn, times = np.unique(
        np.random.default_rng(0).multinomial(n, [lost, gained, 1 - lost - gained], size=runs), axis=0, return_counts=True
    )
    decided = sum(
        count for (c, b, _), count in zip(drawn, times, strict=True) if test(Pairs(n, int(c), int(b)), MARGIN) <= level
    )
    assert decided / runs >= 0.9 - 3.1 * math.sqrt(0.9 * 0.1 / runs)


def test_far_fewer_samples_than_advised_do_not_decide_and_the_search_ends_at_the_most() -> None:
    for lost, gained in RATES[1:]:
        for_pass = lost - gained < MARGIN
        n = samples_to_decide(lost, gained, MARGIN, 0.0025, 0.9, 1_000_000)
        assert decision_power(int(0.85 * n), lost, gained, MARGIN, 0.0025, for_pass) < 0.9
    assert samples_to_decide(0.0499, 0.0, MARGIN, 0.0025, 0.9, 5000) == 5000
