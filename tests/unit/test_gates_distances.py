"""The gates on distances by simulation: shapes that real KV caches have, scaled to lie exactly at a threshold."""

import math

import numpy as np
import pytest
from gate_reports import GATES, lines, report, row
from scipy.special import stdtrit

from benchmarks.gate_distances import SOUND, betting, scaled
from benchmarks.gate_shapes import load
from pipeline.statistics import bounds
from pipeline.statistics.bets import OUTLIER
from pipeline.verdict.report import SampleRow

SHAPES = load()
LIMIT = GATES.max_mean_kl
WORST = OUTLIER * LIMIT
EMPTY = report([])
RUNS = 400


def at_most(rate: float, runs: int = RUNS) -> float:
    """The most of `runs` that a true rate gives, but for one time in a thousand, as a share."""
    return rate + 3.1 * math.sqrt(rate * (1 - rate) / runs)


@pytest.mark.parametrize("documents", [24, 144, 576])
def test_no_shape_exactly_at_the_mean_kl_passes_in_more_than_5_percent(documents: int) -> None:
    rng = np.random.default_rng(1)
    tested = 0
    for shape in SHAPES:
        at_limit = scaled(shape.values["mean_kl"], LIMIT, WORST)
        if at_limit is None:
            continue  # so few requests have all of the KL that cut ones cannot reach the limit: they are ruined requests
        values = np.minimum(rng.choice(at_limit, (RUNS, documents)), WORST)
        assert betting(values, GATES.alpha, WORST, LIMIT).mean() <= at_most(0.05), shape
        tested += 1
    assert tested > 30


def test_sound_engines_pass_as_they_were_measured() -> None:
    sound, rng = [shape for shape in SHAPES if shape.policy in SOUND], np.random.default_rng(3)
    assert {(shape.model, shape.policy) for shape in sound} == {(model, p) for model in ("tiny", "smollm2") for p in SOUND}
    for shape in sound:
        drawn = rng.choice(shape.values["mean_kl"], (200, len(shape.flips)))
        assert betting(np.minimum(drawn, WORST), GATES.pass_alpha, WORST, LIMIT).mean() >= 0.9, shape


def rows_of(values: bounds.Array, samples: int = 1) -> list[SampleRow]:
    """A row for each mean KL, `samples` of them of a document."""
    return [row("copy", i, document=f"d{i // samples}", mean_kl=float(kl)) for i, kl in enumerate(values)]


@pytest.mark.parametrize("samples", [1, 4])
def test_the_gate_itself_rarely_passes_at_its_threshold(samples: int) -> None:
    """Through the gate on rows; where four samples of a document are alike, the documents are what counts."""
    shape = next(s for s in SHAPES if (s.model, s.policy, s.workload) == ("smollm2", "fp8k_int4v", "extraction"))
    at_limit, rng = scaled(shape.values["mean_kl"], LIMIT, WORST), np.random.default_rng(4)
    assert at_limit is not None
    wrong = 0
    for _ in range(60):
        drawn = np.repeat(rng.choice(at_limit, 40), samples)
        checks = lines("max_mean_kl", EMPTY, rows_of(drawn, samples))
        wrong += next(check.status for check in checks if check.gate == "max_mean_kl") == "PASS"
    assert wrong / 60 <= at_most(0.05, 60)


def test_real_sound_engines_pass_every_distance_of_every_workload_and_broken_ones_fail() -> None:
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
                mean_squared_delta_p=shape.values["mean_squared_delta_p"][i],
            )
            for shape in SHAPES
            if (shape.model, shape.policy) == (model, policy)
            for i, document in enumerate(shape.documents)
        ]
        checks = [check for key in ("max_mean_kl", "max_ruined_share", "max_kl_slope") for check in lines(key, EMPTY, rows)]
        statuses = {check.status for check in checks}
        if policy in SOUND:
            assert statuses <= {"PASS", "WARNING"}, (model, policy, [c.reason for c in checks if c.status != "PASS"])
        else:
            assert "FAIL" in statuses, (model, policy)


@pytest.mark.parametrize(("samples", "correlation"), [(160, 0.0), (640, 0.0), (160, 0.2)])
def test_ruined_requests_at_the_limit_pass_in_at_most_5_percent(samples: int, correlation: float) -> None:
    """Independent, and where a fifth of the documents of four is ruined as a whole."""
    rng, share, wrong = np.random.default_rng(5), GATES.max_ruined_share, 0
    sound, ruined = row("copy", 0), row("copy", 0, mean_kl=5.0)
    names = [f"d{i // 4 if correlation else i}" for i in range(samples)]
    pool = [tuple(r.model_copy(update={"document": name}) for r in (sound, ruined)) for name in names]
    for _ in range(150):
        whole = rng.random(samples // 4 + 1) < correlation
        together, apart = rng.random(samples // 4 + 1), rng.random(samples)
        draws = [together[i // 4] if whole[i // 4] else apart[i] for i in range(samples)]
        rows = [pair[int(draw < share)] for pair, draw in zip(pool, draws, strict=True)]
        wrong += lines("max_ruined_share", EMPTY, rows)[0].status == "PASS"
    assert wrong / 150 <= at_most(0.05, 150)


def test_without_anything_lost_the_bound_is_the_rule_of_three_but_for_the_mixture() -> None:
    assert bounds.upper_bound(np.zeros(100), 0.05, 1.0) == pytest.approx(1 - 0.05 ** (1 / 100), rel=0.35)
    assert bounds.upper_bound(np.zeros(100), 0.05, 1.0) > 1 - 0.05 ** (1 / 100)
    assert bounds.share_bound(0, 100, 0.05, lower=False) == pytest.approx(1 - 0.05 ** (1 / 100))


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_limit_at_the_farthest_value_is_contradicted_by_any_other_value_and_by_nothing_else(limit: float) -> None:
    """There a bet has nothing to lose: of values at the limit it says nothing, and of any other it is certain."""
    wealth = bounds.log_wealth_above if limit == 0 else bounds.log_wealth_below
    at_limit = np.full(30, limit)
    assert wealth(at_limit, limit, limit) == pytest.approx(0, abs=1e-12)
    assert wealth(np.append(at_limit, 0.5), limit, limit) == math.inf
    assert bounds.lower_bound(np.zeros(30), 0.05, 0.0) == 0
    assert bounds.upper_bound(np.ones(30), 0.05, 1.0) == 1


def test_student_s_t_allows_for_skewed_values_and_is_plain_where_there_is_no_skew() -> None:
    even = np.array([-1.0, 1.0] * 20)
    plain = float(even.std(ddof=1)) / math.sqrt(40) * float(-stdtrit(39, 0.01))
    assert bounds.skewed_upper_bound(even, 0.01) == pytest.approx(plain)
    losses = np.random.default_rng(0).exponential(size=(4000, 40))
    wrong = (bounds.skewed_upper_bound(losses, 0.01) < 1).mean()
    means, errors = losses.mean(axis=1), losses.std(axis=1, ddof=1) / math.sqrt(40)
    assert wrong < 0.02 < (means - stdtrit(39, 0.01) * errors < 1).mean()
    assert bounds.skewed_upper_bound(np.full(40, 0.3), 0.01) == pytest.approx(0.3)


def test_the_slopes_error_is_that_of_documents() -> None:
    rng = np.random.default_rng(0)
    x, level = rng.random(60), rng.normal(size=60) * 0.1
    slope, error = bounds.clustered_slope(x, 0.3 * x + level, [str(i) for i in range(60)])
    repeated = bounds.clustered_slope(np.repeat(x, 3), np.repeat(0.3 * x + level, 3), [str(i // 3) for i in range(180)])
    assert repeated == pytest.approx((slope, error))
    assert error == pytest.approx(0.1 / (x.std() * math.sqrt(60)), rel=0.3)


def test_a_capped_mean_is_called_so_beside_the_mean_that_tables_and_charts_show() -> None:
    ruined = [row("copy", n, True, True, mean_kl=4.0 if n == 0 else 0.001) for n in range(64)]
    line = next(one for one in lines("max_mean_kl", EMPTY, ruined) if one.gate == "max_mean_kl")
    assert "mean KL 0.003328 where a document counts as 0.15 at most (0.06348 whole)" in line.reason
    whole = [row("copy", n, True, True, mean_kl=4.0) for n in range(64)]
    line = next(one for one in lines("max_mean_kl", EMPTY, whole) if one.gate == "max_mean_kl")
    assert line.status == "FAIL"
    assert "mean KL 4, " in line.reason
