import math
from pathlib import Path

from pipeline.registry.summary import Candidate, Cited
from pipeline.verdict.report import SampleRow
from pipeline.verdict.thresholds import Status
from stages.evaluate.plots import flips_by_workload, kl_by_context, quality_by_memory

PNG = b"\x89PNG\r\n\x1a\n"


def row(workload: str, tokens: int, kl: float | None, baseline: bool | None = None, candidate: bool | None = None) -> SampleRow:
    return SampleRow.model_construct(
        workload=workload, context_tokens=tokens, mean_kl=kl, judged=baseline is not None,
        baseline_correct=baseline, candidate_correct=candidate,
    )  # fmt: skip


ROWS = [row("copy", 100, 0.0, True, False), row("copy", 900, 0.2, False, True), row("prose", 50, None)]
CITED = Cited(path=Path("/nowhere"), digest="")


def candidate(policy: str, verdict: Status, kib_per_token: float, kl_mean: float | None) -> Candidate:
    return Candidate(
        name=policy, policy=policy, model="tiny", backend="onnxruntime", verdict=verdict, reasons=(),
        metrics={"memory/kib_per_token": kib_per_token, "quality/kl_mean": kl_mean},
        engine=CITED, baseline=CITED, report=CITED, identity=CITED,
    )  # fmt: skip


FP8 = candidate("fp8", "PASS", 2.0, 0.0)
BROKEN = candidate("int4", "FAIL", math.nan, None)


def test_each_plot_is_a_png_even_with_zero_missing_and_no_values(tmp_path: Path) -> None:
    for rows in (ROWS, []):
        assert kl_by_context(rows, "fp8", tmp_path / "plots" / "kl.png").read_bytes().startswith(PNG)
        assert flips_by_workload(rows, "fp8", tmp_path / "flips.png").read_bytes().startswith(PNG)
    for candidates in ([FP8, BROKEN], [BROKEN]):
        assert quality_by_memory(candidates, tmp_path / "memory.png").read_bytes().startswith(PNG)


def test_the_same_rows_draw_the_same_bytes(tmp_path: Path) -> None:
    one, two = (kl_by_context(ROWS, "fp8", tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert one == two
