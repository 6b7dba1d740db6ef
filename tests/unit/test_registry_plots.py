import math
from pathlib import Path
from typing import Any

import pytest
from gate_reports import GATES, gates
from matplotlib.axes import Axes

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
        metrics={"memory/kib_per_token": kib_per_token, "quality/kl_mean": kl_mean, "noise/kl_mean": 1e-5,
                 "baseline/kib_per_token": 4.0},
        engine=CITED, baseline=CITED, report=CITED, identity=CITED,
    )  # fmt: skip


FP8 = candidate("fp8", "PASS", 2.0, 0.0)
BROKEN = candidate("int4", "FAIL", math.nan, None)


def test_each_plot_is_a_png_even_with_zero_missing_and_no_values(tmp_path: Path) -> None:
    for rows in (ROWS, []):
        for noise in (None, 0.0, 1e-4):
            path = tmp_path / "plots" / "kl.png"
            assert kl_by_context(rows, "fp8", path, gates=GATES, noise=noise).read_bytes().startswith(PNG)
        assert flips_by_workload(rows, "fp8", tmp_path / "flips.png", gates=GATES).read_bytes().startswith(PNG)
    for candidates in ([FP8, BROKEN], [BROKEN], []):
        assert quality_by_memory(candidates, tmp_path / "memory.png", gates=GATES).read_bytes().startswith(PNG)


def test_the_same_rows_draw_the_same_bytes(tmp_path: Path) -> None:
    paths = (tmp_path / name for name in ("a.png", "b.png"))
    one, two = (kl_by_context(ROWS, "fp8", path, gates=GATES, noise=None).read_bytes() for path in paths)
    assert one == two


def test_thresholds_the_noise_floor_and_fp16_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heights: list[float] = []
    points: list[tuple[float, float]] = []
    axhline, scatter = Axes.axhline, Axes.scatter

    def line(axes: Axes, y: float = 0, **options: Any) -> Any:
        heights.append(y)
        return axhline(axes, y, **options)

    def dots(axes: Axes, x: Any, y: Any, **options: Any) -> Any:
        if isinstance(x, float):
            points.append((x, y))
        return scatter(axes, x, y, **options)

    monkeypatch.setattr(Axes, "axhline", line)
    monkeypatch.setattr(Axes, "scatter", dots)
    limits = gates(max_mean_kl=0.01)
    kl_by_context(ROWS, "fp8", tmp_path / "kl.png", gates=limits, noise=1e-5)
    assert heights == [0.01, 0.04, 1e-5]
    heights.clear()
    quality_by_memory([FP8, FP8, BROKEN], tmp_path / "memory.png", gates=limits)
    assert (heights, points) == ([0.01, 1e-5], [(4.0, 1e-5)])


def test_the_margin_of_a_workload_is_drawn_in_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    margins: list[float] = []
    monkeypatch.setattr(Axes, "plot", lambda _, __, heights, **___: margins.append(heights[0]))
    rows = [row(name, 1, 0.0, True, True) for name in ("copy", "retrieval") for _ in range(20)]
    flips_by_workload(rows, "fp8", tmp_path / "flips.png", gates=gates(margin=0.05, margins={"retrieval": 0.1}))
    assert margins == [-1.0, -2.0]
