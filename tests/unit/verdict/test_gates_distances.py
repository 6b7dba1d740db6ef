"""The gates on distances, simulated with the KLs of real KV caches, scaled to a mean exactly at the threshold."""

import math

import numpy as np
import pytest
from helpers.verdicts.reports import GATES, at_most, lines, report, row

from benchmarks.gate_shapes import load
from benchmarks.gates import SOUND_KL, scaled
from stages.verdict.bets import PASS_STAKES, Array, Mean, log_score

SHAPES = load()
LIMIT = GATES.max_mean_kl
EMPTY = report([])
DISTANCES = ("max_mean_kl", "min_top10_overlap", "max_ruined_share", "max_far_token_share")
RUNS = 400


def pass_rate(values: Array) -> float:
    """Return the share of runs whose mean KL passes. `values`: KLs (runs, documents)."""
    return float((log_score(Mean(values, LIMIT).pass_gains(LIMIT), PASS_STAKES) >= -math.log(GATES.pass_alpha)).mean())


@pytest.mark.parametrize("documents", [24, 144, 576])
def test_a_mean_kl_at_the_limit_passes_in_at_most_5_percent(documents: int) -> None:
    rng = np.random.default_rng(1)
    tested = 0
    for shape in SHAPES:
        at_limit = scaled(shape.values["mean_kl"], LIMIT)
        if at_limit is None:  # a few ruined requests have all of the KL, which other gates catch
            continue
        assert pass_rate(rng.choice(at_limit, (RUNS, documents))) <= at_most(GATES.pass_alpha, RUNS), shape
        tested += 1
    assert tested > 30


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
