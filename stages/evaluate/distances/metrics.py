"""Summarizes rows and per-token statistics into the slices of the report."""

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from stages.evaluate.distances.distance import Array, StepStatistics
from stages.verdict.record import finite
from stages.verdict.report import Accuracy, Fidelity, SampleRow, Slice

SliceKey = tuple[str | None, tuple[int, int | None] | None]
"""(workload, context bin) of a slice; None means all."""


def context_bin(tokens: int, edges: Sequence[int]) -> tuple[int, int | None]:
    """Return the bin [low, high) that contains `tokens`; the last bin has no upper end.

    Args:
        tokens: Tokens of the prompt.
        edges: Lower ends of the bins in tokens, ascending.
    """
    position = max(0, int(np.searchsorted(edges, tokens, side="right")) - 1)
    return edges[position], edges[position + 1] if position + 1 < len(edges) else None


def _exp(value: float) -> float | None:
    return math.exp(value) if value < 700 else None  # NaN compares false


def fidelity(steps: StepStatistics) -> Fidelity:
    """Summarize the statistics of tokens.

    A NaN makes the summaries of its column null, because no token may be left out of a mean or a percentile.
    """

    def mean(values: Array) -> float:
        return float(values.mean())

    baseline_nll, candidate_nll = mean(steps.baseline_nll), mean(steps.candidate_nll)
    p999, largest = (finite(value) for value in np.percentile(steps.kl, [99.9, 100]).tolist())
    return Fidelity(
        tokens=len(steps.kl),
        baseline_nll=finite(baseline_nll),
        candidate_nll=finite(candidate_nll),
        ppl_ratio=_exp(candidate_nll - baseline_nll),
        kl_mean=finite(mean(steps.kl)),
        kl_p999=p999,
        kl_max=largest,
        top1_agreement=finite(mean(steps.top1)),
        top10_overlap=finite(mean(steps.top10)),
        rms_delta_p=finite(math.sqrt(mean(steps.delta_p**2))),
        non_finite_steps=int((~np.isfinite(steps.kl)).sum()),
    )


def slices(rows: Sequence[SampleRow], statistics: Sequence[StepStatistics], edges: Sequence[int]) -> list[Slice]:
    """Summarize all rows together, by workload, by context bin, and by workload and context bin.

    Args:
        rows: The rows of an evaluation.
        statistics: Token statistics, by row.
        edges: Lower ends of the context bins in tokens.

    Returns:
        The slices that have samples, sorted by workload and context.
    """
    members: dict[SliceKey, list[int]] = {}
    for i, row in enumerate(rows):
        for key in product((None, row.workload), (None, context_bin(row.context_tokens, edges))):
            members.setdefault(key, []).append(i)

    def order(key: SliceKey) -> tuple[str, int]:
        return key[0] or "", -1 if key[1] is None else key[1][0]

    summaries = []
    for key in sorted(members, key=order):
        slice_rows = [rows[i] for i in members[key]]
        judged = [row for row in slice_rows if row.judged]
        steps = StepStatistics.joined([statistics[i] for i in members[key]])
        summaries.append(
            Slice(
                workload=key[0],
                context=key[1],
                samples=len(slice_rows),
                accuracy=Accuracy.of(judged) if judged else None,
                fidelity=fidelity(steps),
            )
        )
    return summaries
