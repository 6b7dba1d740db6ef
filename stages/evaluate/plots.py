"""Draws evaluations and sweeps into PNG files; the only module that imports matplotlib."""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipeline.planning.records import Capacity
from pipeline.planning.tuning import TuneReport
from pipeline.registry.summary import Candidate
from pipeline.statistics.bets import OUTLIER
from pipeline.verdict.gates import Gates
from pipeline.verdict.report import SampleRow

VERDICT_COLOURS = {"PASS": "#1a7f37", "FAIL": "#cf222e", "INCONCLUSIVE": "#bf8700"}
VERDICT_MARKERS = {"PASS": "o", "FAIL": "X", "INCONCLUSIVE": "s"}
UNDECIDED = "#6e7781"
LOST, GAINED = "#cf222e", "#0969da"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette: distinct for colour-blind readers."""

MEMORY = "memory/kib_per_token"
KL, NOISE = "quality/kl_mean", "noise/kl_mean"

FLOOR = 1e-7
"""Smallest KL on the logarithmic axis; smaller values, zero included, are drawn at this height."""


def _axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, which="major", color="#d8dee4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _threshold(axes: Axes, height: float, label: str) -> None:
    """Draw the height that a gate allows, with its key."""
    axes.axhline(height, color=LOST, linewidth=1, linestyle="--")
    axes.annotate(label, (1, height), xycoords=("axes fraction", "data"), xytext=(-3, 3), textcoords="offset points",
                  ha="right", fontsize=8, color=LOST)  # fmt: skip


def _noise_floor(axes: Axes, noise: float | None) -> None:
    """Draw the KL of the baseline against itself, below which a distance says nothing; nothing where none was measured."""
    if noise is None or not math.isfinite(noise):
        return
    lower = f" {noise:.0e}, below this axis" if noise < FLOOR else ""
    axes.axhline(max(noise, FLOOR), color=UNDECIDED, linewidth=1, linestyle=":")
    axes.annotate(f"FP16 against itself{lower}", (0, max(noise, FLOOR)), xycoords=("axes fraction", "data"), xytext=(3, 3),
                  textcoords="offset points", fontsize=8, color=UNDECIDED)  # fmt: skip


def kl_by_context(rows: Sequence[SampleRow], policy: str, path: Path, *, gates: Gates, noise: float | None) -> Path:
    """Plot the mean KL of each sample against its context length, by workload; returns `path`.

    Args:
        rows: The samples.
        policy: Name of the candidate.
        path: The file.
        gates: Their limit of the mean of a workload is drawn, and the four times as much that ruin a request.
        noise: Mean KL of the baseline against itself; None where it was not measured.
    """
    figure, axes = _axes(f"{policy}: distance from the FP16 cache by context", "context [tokens]", "mean KL [nats/token]")
    drawn = [(row, row.mean_kl) for row in rows if row.mean_kl is not None]
    for colour, workload in zip(cycle(SERIES), sorted({row.workload for row, _ in drawn}), strict=False):
        points = [(row, kl) for row, kl in drawn if row.workload == workload]
        tokens, kls = [row.context_tokens for row, _ in points], [max(kl, FLOOR) for _, kl in points]
        axes.scatter(tokens, kls, s=14, alpha=0.65, color=colour, linewidths=0, label=workload)
    missing = len(rows) - len(drawn)
    if missing:
        axes.text(0.99, 0.02, f"{missing} without a finite KL", transform=axes.transAxes, ha="right", color=LOST)
    axes.set_yscale("log")
    _threshold(axes, gates.max_mean_kl, "gates.max_mean_kl, of a workload")
    _threshold(axes, OUTLIER * gates.max_mean_kl, "a ruined request")
    _noise_floor(axes, noise)
    if drawn:
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _save(figure, path)


def quality_by_memory(candidates: Sequence[Candidate], path: Path, *, gates: Gates) -> Path:
    """Plot the mean KL of each candidate against its cache's bytes per token; returns `path`.

    Down and left is better. FP16 stands at what its engine gives against itself, the noise floor, and the dashed line is what
    the gates allow. Candidates whose values are not finite are left out.
    """
    figure, axes = _axes("What a smaller cache costs in quality", "cache [KiB/token]", "mean KL [nats/token]")
    drawn = [c for c in candidates if math.isfinite(c.metric(MEMORY)) and math.isfinite(c.metric(KL))]
    for verdict in dict.fromkeys(c.verdict for c in drawn):
        group = [c for c in drawn if c.verdict == verdict]
        axes.scatter(
            [c.metric(MEMORY) for c in group],
            [max(c.metric(KL), FLOOR) for c in group],
            s=70,
            color=VERDICT_COLOURS.get(verdict, UNDECIDED),
            marker=VERDICT_MARKERS.get(verdict, "D"),
            label=verdict,
            zorder=3,
        )
    for c in drawn:
        point = (c.metric(MEMORY), max(c.metric(KL), FLOOR))
        axes.annotate(c.name, point, xytext=(7, 5), textcoords="offset points", fontsize=9)
    axes.set_yscale("log")
    _threshold(axes, gates.max_mean_kl, "gates.max_mean_kl, of a workload")
    floors = [noise for c in candidates if (noise := c.metrics.get(NOISE)) is not None]
    _noise_floor(axes, max(floors, default=None))
    for kib_per_token in dict.fromkeys(c.metric("baseline/kib_per_token") for c in drawn if floors):
        if math.isfinite(kib_per_token):
            point = (kib_per_token, max(*floors, FLOOR))
            axes.scatter(*point, s=70, color=UNDECIDED, marker="D", zorder=3)
            axes.annotate("fp16", point, xytext=(7, 5), textcoords="offset points", fontsize=9)
    axes.margins(x=0.15, y=0.15)
    if drawn:
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _save(figure, path)


def requests_by_context(capacity: Capacity, path: Path) -> Path:
    """Plot how many requests are admitted if all are of one length, over that length; returns `path`.

    Policies that admit as many at every length share a line. The dashed line is what is asked.
    """
    figure, axes = _axes(f"{capacity.model}: requests that fit by their length", "context [tokens]", "requests")
    alike: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for entry in capacity.policies:
        alike.setdefault(tuple(entry.requests_by_context.items()), []).append(entry.name)
    styles = [(line, colour) for line in ("-", "--", ":", "-.") for colour in SERIES]
    for (line, colour), (points, names) in zip(cycle(styles), sorted(alike.items(), reverse=True), strict=False):
        drawn = [(tokens, requests) for tokens, requests in points if requests]
        label = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        axes.plot([t for t, _ in drawn], [n for _, n in drawn], line, color=colour, linewidth=1.4, label=label)
    axes.axhline(capacity.use.concurrency, color=UNDECIDED, linewidth=0.8, linestyle=(0, (4, 4)))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _save(figure, path)


def flips_by_workload(rows: Sequence[SampleRow], policy: str, path: Path, *, gates: Gates) -> Path:
    """Plot the answers that only one of baseline and candidate got right, lost below zero, gained above; returns `path`.

    The dashed line of a workload is its margin: so many more may be lost than gained.
    """
    judged = [row for row in rows if row.judged]
    workloads = sorted({row.workload for row in judged})
    count = {w: sum(row.workload == w for row in judged) for w in workloads}
    lost = [_flips(judged, w, baseline=True) for w in workloads]
    gained = [_flips(judged, w, baseline=False) for w in workloads]
    figure, axes = _axes(f"{policy}: answers that changed", "", "answers")
    places = range(len(workloads))
    for values, sign, colour, label in ((gained, 1, GAINED, "gained"), (lost, -1, LOST, "lost")):
        bars = axes.bar(places, [sign * value for value in values], color=colour, width=0.6, label=label)
        axes.bar_label(bars, [str(value) if value else "" for value in values], padding=2, fontsize=9)
    axes.axhline(0, color="#24292f", linewidth=0.8)
    allowed = [gates.margin_of(w) * count[w] for w in workloads]
    for place, most in zip(places, allowed, strict=True):
        name = "margin, lost - gained" if place == 0 else None
        axes.plot([place - 0.4, place + 0.4], [-most, -most], color="#24292f", linewidth=1.4, linestyle="--", label=name)
    axes.set_xticks(places, [f"{w}\nn = {count[w]}" for w in workloads])
    axes.grid(False, axis="x")
    reach = max([1, *lost, *gained, *allowed]) * 1.25
    axes.set_ylim(-reach, reach)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _save(figure, path)


def _flips(rows: Sequence[SampleRow], workload: str, *, baseline: bool) -> int:
    """Count a workload's samples where the baseline is right (`baseline=True`) or wrong, and the candidate the opposite."""
    return sum(
        row.workload == workload and row.baseline_correct is baseline and row.candidate_correct is not baseline for row in rows
    )


def tuned_front(report: TuneReport, path: Path) -> Path:
    """Plot the KL of measured policies on the texts held out against their bytes, with the Pareto front; returns `path`."""
    figure, axes = _axes("Formats chosen by layer and side", "cache [bytes/token]", "mean KL, texts held out [nats/token]")
    drawn = [(one, one.kl_held_out) for one in report.measured if one.kl_held_out is not None]
    for origin, colour, marker in (("uniform", UNDECIDED, "s"), ("tuned", SERIES[0], "o"), ("modelopt", SERIES[1], "D")):
        group = [(one, max(kl, FLOOR)) for one, kl in drawn if one.origin == origin]
        if group:
            points = [one.bytes_per_token for one, _ in group], [kl for _, kl in group]
            axes.scatter(*points, s=40, color=colour, marker=marker, label=origin, zorder=3)
        if origin != "tuned":
            for one, kl in group:
                axes.annotate(one.policy.name, (one.bytes_per_token, kl), xytext=(6, 4), textcoords="offset points", fontsize=8)
    front = sorted((one.bytes_per_token, max(kl, FLOOR)) for one, kl in drawn if one.on_front)
    if front:
        axes.step(*zip(*front, strict=True), where="post", color=SERIES[0], linewidth=1, alpha=0.6, label="Pareto front")
    axes.axhline(report.max_kl, color=LOST, linewidth=0.8, linestyle="--", label="tune.max_kl")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=9)
    return _save(figure, path)
