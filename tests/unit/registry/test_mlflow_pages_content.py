"""MLflow's view of a candidate: the numbers."""

from pathlib import Path

from helpers.registry.candidates import judged_candidate
from helpers.verdicts.reports import answered, sliced

from pipeline.registry.pages import FIRST, LIMIT, chosen


def test_a_run_has_few_metrics_however_many_kinds_of_work_there_are(tmp_path: Path) -> None:
    rows = [one for number in range(40) for one in answered(f"kind{number:02}", 2)]
    metrics = chosen(judged_candidate(tmp_path, "fp8", metrics=sliced(rows).metrics | {"memory/kib_per_token": 1.0}))
    assert len(metrics) == LIMIT == 40
    assert "quality/kind00/kl_mean" in metrics


def test_the_metrics_that_decide_come_first_and_the_distance_has_a_logarithm(tmp_path: Path) -> None:
    own = {"quality/recovery": 0.9, "memory/kib_per_token": 1.0, "quality/kl_mean": 0.0}
    metrics = chosen(judged_candidate(tmp_path, "fp8", metrics={**own, "baseline/kib_per_token": 2.0}))
    assert list(metrics.items()) == [*zip(FIRST, (0.9, -9.0, 1.0), strict=True), ("quality/kl_mean", 0.0)]
