"""Mean distances of the next-token distributions from the baseline's, per workload and by document.

PASS when a bet of what PASS may err with shows the mean to be within its limit, where a document counts at most as three times
the limit; FAIL when a bet shows it, uncut, to be outside (`pipeline.statistics.bounds`). A bet may be looked at at any time. A
FAIL has alpha over the number of all distances that are tested together.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pipeline import statistics
from pipeline.verdict import thresholds
from pipeline.verdict.record import finite
from pipeline.verdict.registry import Evidence, Line, by_workload, gate
from pipeline.verdict.report import SampleRow
from pipeline.verdict.thresholds import Check, LineStatus, Positive

if TYPE_CHECKING:
    from pipeline.statistics.bets import Mean, Result
    from pipeline.statistics.bounds import Array


class Limits(thresholds.Limits):
    """The defaults are four times what sound caches of a real model show: SmolLM2 at FP8 has a mean KL of 0.006, with INT4
    values 0.012, while INT4 keys and values in groups of 32, which lose answers, have 0.08 (`make real`)."""

    max_mean_kl: Positive = 0.05
    """Mean KL(baseline || candidate) per workload, nats per token; a request counts as three times this at most."""
    min_top10_overlap: Annotated[float, Field(ge=0, lt=1)] = 0.8
    """Mean share of the ten most likely tokens that both engines agree on, per workload. SmolLM2 at FP8: 0.95."""
    max_ppl_ratio: Annotated[float, Field(gt=1)] = 1.05
    """Candidate's perplexity over the baseline's, per workload. SmolLM2 at FP8: 1.005."""
    max_rms_delta_p: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Root mean square change of the reference token's probability, per workload. SmolLM2 at FP8: 0.035."""


@dataclass(frozen=True)
class Distance:
    """A distance as a mean over documents that is worse when it is larger."""

    gate: str
    label: str
    mean: "Mean"
    shown: Callable[[float], float] = float
    """From such a mean to what is configured and shown."""

    @property
    def uncut(self) -> str:
        """Say what the mean is with outliers whole, as tables and charts have it; nothing where none is cut."""
        values, worst = self.mean.values, self.mean.worst
        if not (values > worst).any():
            return ""
        return f" where a document counts as {self.shown(worst):.3g} at most ({self.shown(float(values.mean())):.4g} whole)"


def measured(rows: Sequence[SampleRow], limits: Limits) -> Iterator[Distance]:
    """Yield the distances of some samples."""
    tokens, mean = [row.scored_tokens for row in rows], statistics.bets.Mean
    kl = means(rows, [row.mean_kl for row in rows], tokens)
    yield Distance("max_mean_kl", "mean KL", mean(kl, limits.max_mean_kl))
    overlap = means(rows, [row.top10_overlap for row in rows], tokens)
    yield Distance("min_top10_overlap", "top-10 overlap", mean(1 - overlap, 1 - limits.min_top10_overlap), lambda m: 1 - m)
    pairs = [(row.candidate_nll, row.baseline_nll) for row in rows]
    nll = means(rows, [None if after is None or before is None else after - before for after, before in pairs], tokens)
    log_ratio = math.log(limits.max_ppl_ratio)
    best = -statistics.bets.OUTLIER * log_ratio
    yield Distance("max_ppl_ratio", "PPL ratio", mean(nll, log_ratio, best), lambda m: math.exp(min(m, 700.0)))
    squared = means(rows, [row.mean_squared_delta_p for row in rows], tokens)
    rms = limits.max_rms_delta_p
    yield Distance("max_rms_delta_p", "RMS change of p", mean(squared, rms * rms), math.sqrt)


def means(rows: Sequence[SampleRow], values: Sequence[float | None], weights: Sequence[float]) -> "Array":
    """Return the mean of each document, shape (documents,); NaN where a value is missing."""
    return statistics.bounds.by_document(values, weights, [row.document for row in rows])


def compared(
    key: str,
    where: str,
    label: str,
    result: "Result",
    threshold: float,
    shown: Callable[[float], float] = float,
    unclear: LineStatus = "INCONCLUSIVE",
    uncut: str = "",
) -> Check:
    """Return the line of a figure beside its threshold; `unclear` where the test decided nothing, `uncut` behind the figure."""
    status: LineStatus = result.decision or unclear
    value, bound = shown(result.value), shown(result.bound)
    judgement = {"PASS": "within", "FAIL": "outside"}.get(status, "not clearly within")
    side = "at least" if key.startswith("min_") else "at most"
    reason = (
        f"{where}: {label} {value:.4g}{uncut}, {100 * (1 - result.level):.4g} % bound {bound:.4g}, {judgement} {key} "
        f"({side} {threshold:g})"
    )
    return Check(
        gate=key, where=where, value=finite(value), bound=finite(bound), threshold=threshold, status=status, reason=reason
    )


CAP = "; but for a FAIL, a document counts as three times the limit at most"
MEANS = {
    "max_mean_kl": Line("Mean KL", f"nats per token from FP16{CAP}", per="workload"),
    "min_top10_overlap": Line(
        "Top-10 overlap", f"share of the ten most likely tokens that both agree on{CAP}", per="workload", equal=1.0
    ),
    "max_ppl_ratio": Line("Perplexity ratio", f"the policy's over that of FP16{CAP}", per="workload", equal=1.0),
    "max_rms_delta_p": Line("RMS change of p", f"of the reference token's probability{CAP}", per="workload"),
}


@gate(Limits, MEANS, rank=23, looks=True, tests=lambda _, rows: len(MEANS) * len({row.workload for row in rows}))
def distances(evidence: Evidence, limits: Limits) -> Iterator[Check]:
    """Test the mean distances of every workload.

    A few texts without answers (below 15 documents) beside samples with answers can fail, and else warn: they cannot show that
    they are within a limit.
    """
    for workload, rows in by_workload(evidence.rows).items():
        few = not statistics.bets.can_pass(len({row.document for row in rows}), limits.pass_alpha)
        beside = few and evidence.judged and not any(row.judged for row in rows)
        for one in measured(rows, limits):
            result = one.mean.test(limits.alpha / evidence.together, limits.pass_alpha)
            unclear: LineStatus = "WARNING" if beside else "INCONCLUSIVE"
            uncut = "" if result.decision == "FAIL" else one.uncut
            yield compared(one.gate, workload, one.label, result, getattr(limits, one.gate), one.shown, unclear, uncut)
