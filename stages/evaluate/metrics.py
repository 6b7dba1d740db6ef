"""From rows and per-token statistics to the slices of the report."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.verdict.distances import kl_slope
from pipeline.verdict.report import STEP_FLAG_KL, Accuracy, Fidelity, SampleRow, Slice, Slope
from stages.evaluate.distance import Array, StepStatistics

DEPTHS = ("early", "middle", "late")


def depth_name(depth: float) -> str:
    """The third of the prompt in which the needle lies."""
    return DEPTHS[min(int(depth * len(DEPTHS)), len(DEPTHS) - 1)]


def context_bin(tokens: int, edges: Sequence[int]) -> tuple[int, int | None]:
    """The bin [low, high) that holds `tokens`; the last one is open."""
    position = max(0, int(np.searchsorted(edges, tokens, side="right")) - 1)
    return edges[position], edges[position + 1] if position + 1 < len(edges) else None


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _exp(value: float) -> float | None:
    return math.exp(value) if value < 700 else None  # NaN compares false


def fidelity(steps: StepStatistics) -> Fidelity:
    """Summary over tokens. A step that is not a number makes every summary null: nothing is averaged around it."""

    def mean(values: Array) -> float:
        return float(values.mean())

    before, after = mean(steps.baseline_nll), mean(steps.candidate_nll)
    percentiles = np.percentile(steps.kl, [50, 95, 99, 99.9, 100]).tolist()
    median, p95, p99, p999, largest = (_number(value) for value in percentiles)
    flagged = np.where(np.isfinite(steps.kl), steps.kl > STEP_FLAG_KL, np.nan)
    return Fidelity(
        tokens=len(steps.kl),
        baseline_nll=_number(before),
        candidate_nll=_number(after),
        baseline_ppl=_exp(before),
        candidate_ppl=_exp(after),
        ppl_ratio=_exp(after - before),
        kl_mean=_number(mean(steps.kl)),
        kl_median=median,
        kl_p95=p95,
        kl_p99=p99,
        kl_p999=p999,
        kl_max=largest,
        flagged_steps=_number(mean(flagged)),
        top1_agreement=_number(mean(steps.top1)),
        top10_overlap=_number(mean(steps.top10)),
        rms_delta_p=_number(math.sqrt(mean(steps.delta_p**2))),
        non_finite_steps=int((~np.isfinite(steps.kl)).sum()),
    )


def accuracy(rows: Sequence[SampleRow]) -> Accuracy | None:
    """Paired answers of the judged rows, None when there are none."""
    judged = [row for row in rows if row.judged]
    if not judged:
        return None

    def share(values: list[bool | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return Accuracy(
        judged=len(judged),
        baseline=sum(bool(row.baseline_correct) for row in judged) / len(judged),
        candidate=sum(bool(row.candidate_correct) for row in judged) / len(judged),
        lost=sum(bool(row.baseline_correct) and not row.candidate_correct for row in judged),
        gained=sum(bool(row.candidate_correct) and not row.baseline_correct for row in judged),
        baseline_valid=share([row.baseline_valid for row in judged]),
        candidate_valid=share([row.candidate_valid for row in judged]),
    )


def _keys(row: SampleRow, edges: Sequence[int]) -> Iterator[tuple[str | None, tuple[int, int | None] | None, str | None]]:
    """The slices that a row belongs to: (workload, context bin, depth), None standing for all."""
    where = context_bin(row.context_tokens, edges)
    yield None, None, None
    yield row.workload, None, None
    yield None, where, None
    yield row.workload, where, None
    if row.depth is not None:
        yield row.workload, None, depth_name(row.depth)


def slices(rows: Sequence[SampleRow], statistics: Sequence[StepStatistics], edges: Sequence[int]) -> list[Slice]:
    """Everything, each workload, each context bin of both, and depth by thirds; slices without samples do not exist."""
    members: dict[tuple[str | None, tuple[int, int | None] | None, str | None], list[int]] = {}
    for i, row in enumerate(rows):
        for key in _keys(row, edges):
            members.setdefault(key, []).append(i)

    def order(key: tuple[str | None, tuple[int, int | None] | None, str | None]) -> tuple[str, int, int]:
        workload, context, depth = key
        return workload or "", -1 if context is None else context[0], -1 if depth is None else DEPTHS.index(depth)

    found = []
    for key in sorted(members, key=order):
        mine = [rows[i] for i in members[key]]
        found.append(
            Slice(
                workload=key[0],
                context=key[1],
                depth=key[2],
                samples=len(mine),
                documents=len({row.document for row in mine}),
                accuracy=accuracy(mine),
                fidelity=fidelity(StepStatistics.joined([statistics[i] for i in members[key]])),
            )
        )
    return found


def slope(rows: Sequence[SampleRow]) -> Slope:
    """Growth of the mean KL with the context and its one-sided 95 % bounds."""
    value, replicates = kl_slope(rows)
    replicates = replicates[np.isfinite(replicates)]
    if not math.isfinite(value) or not len(replicates):
        return Slope(per_1k_tokens=None, low=None, high=None)
    low, high = np.quantile(replicates, [0.05, 0.95]).tolist()
    return Slope(per_1k_tokens=value, low=low, high=high)
