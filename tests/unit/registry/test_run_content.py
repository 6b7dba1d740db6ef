"""MLflow's view of a candidate: the numbers and the tables."""

from pathlib import Path

from helpers.registry.candidates import judged_candidate
from helpers.verdicts.reports import answered, row, sliced, verdict

from pipeline.registry.run_content import FIRST, LIMIT, baseline_metrics, candidate_metrics, run_tables
from stages.verdict.candidate import Candidate
from stages.verdict.report import SampleRow


def judged(folder: Path, rows: list[SampleRow]) -> Candidate:
    """Return a candidate with the metrics and the verdict of the given samples."""
    candidate = judged_candidate(folder, "fp8", metrics=sliced(rows).metrics | {"memory/kib_per_token": 1.0})
    return candidate.model_copy(update=Candidate.decided(verdict(rows)))


def test_a_run_has_few_metrics_for_any_number_of_workloads(tmp_path: Path) -> None:
    rows = [one for number in range(40) for one in answered(f"kind{number:02}", 2)]
    metrics = candidate_metrics(judged(tmp_path, rows))
    assert len(metrics) == LIMIT == 40
    assert "quality/kind00/kl_mean" in metrics


def test_deciding_metrics_come_first_under_the_same_names(tmp_path: Path) -> None:
    own = {"perf/inter_token_p95_ms": 5.0, "quality/kl_mean": 0.0, "quality/recovery": 0.9, "memory/kib_per_token": 1.0}
    others = {"baseline/kib_per_token": 2.0, "noise/kl_mean": 0.0, "quality/accuracy_baseline": 0.5}
    candidate = judged_candidate(tmp_path, "fp8", metrics={**own, **others})
    shown = baseline_metrics(candidate)
    assert {name: shown[name] for name in FIRST} == dict(zip(FIRST, (1.0, -9.0, 2.0), strict=True))
    assert shown["quality/accuracy_candidate"] == 0.5
    then = ("quality/kl_mean", 0.0), ("perf/inter_token_p95_ms", 5.0)
    assert list(candidate_metrics(candidate).items()) == [*zip(FIRST, (0.9, -9.0, 1.0), strict=True), *then]
    assert baseline_metrics(candidate.model_copy(update={"metrics": own})) == {}


def test_tables_have_every_check_and_the_worst_samples_first(tmp_path: Path) -> None:
    broken = judged(tmp_path, answered("copy", 64, lost=40))
    rows = [
        row("copy", 1, True, True),
        row("copy", 2, True, False, mean_kl=0.1),
        row("copy", 3, False, True),
        row("copy", 4, True, False, mean_kl=0.3),
        row("copy", 5, True, False, mean_kl=None),
        row("copy", 6, False, False),
    ]
    tables = run_tables(broken, rows)
    samples = tables["samples.json"]
    assert [sample["answer"] for sample in samples] == ["lost"] * 3 + ["gained", "wrong in both", "right in both"]
    assert [sample["mean_kl"] for sample in samples[:3]] == [None, 0.3, 0.1]
    assert len(tables["checks.json"]) == len(broken.checks)
