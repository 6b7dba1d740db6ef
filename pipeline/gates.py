"""Gates: thresholds, and `decide`, which turns a report into PASS, FAIL or INCONCLUSIVE. Pure and deterministic.

What each gate uses (alpha one-sided, statistics in `pipeline.statistics`):

- Accuracy per workload, candidate - baseline, paired by sample: PASS when the exact non-inferiority test clears Holm's
  level (its lower bound lies above -margin), FAIL when the exact inferiority test does (its upper bound lies below).
- Accuracy per context bin: FAIL in the same way, Holm over bins; bins are small and are never asked for a PASS.
- Reports in which no sample has an answer: INCONCLUSIVE below `min_samples` documents, else the distances decide alone.
- Mean KL, top-10 overlap, PPL ratio and RMS delta p per workload, bootstrap by document: PASS when the bound on the bad
  side is within the threshold, FAIL when the bound on the good side is outside.
- p99.9 of the KL over all tokens and the slope of the KL over context: FAIL when the good side's bound is outside, else
  PASS (the other bound of a tail is its maximum, which decides nothing).
- Canary: FAIL unless these gates would have failed the corrupted engine: then they cannot see the cache.
- A/A noise floor: a KL threshold that is not above it decides nothing.

Everything else is INCONCLUSIVE, with the number of samples that would decide. What is missing or not a finite number
never passes. Accuracy is the verdict where there are answers; distances are trip-wires, and their bounds are not adjusted
for how many there are: their thresholds are far from what a sound engine shows.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import UserError
from pipeline.report import EvaluationReport, SampleRow

Status = Literal["PASS", "FAIL", "INCONCLUSIVE"]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Margin = Annotated[float, Field(gt=0, lt=1)]


class Gates(BaseModel):
    """Thresholds, `gates.*` on the command line. Raw values are compared; only texts are rounded."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    alpha: Annotated[float, Field(gt=0, le=0.2)]
    """One-sided error of every bound; over workloads it is shared by Holm's procedure."""
    power: Annotated[float, Field(ge=0.5, lt=1)]
    """With which an equal engine should pass, for the number of samples that an INCONCLUSIVE asks for."""
    margin: Margin
    """Accuracy that a candidate may lose, as a fraction: 0.05 is five points."""
    margins: dict[str, Margin]
    """Other margins by workload."""
    min_samples: Annotated[int, Field(ge=1)]
    """A workload with fewer judged samples cannot pass, nor can a report without answers that has fewer documents."""
    max_mean_kl: Positive
    """Mean KL(baseline || candidate) per workload, nats per token."""
    max_p999_kl: Positive
    """99.9th percentile of the KL over all tokens."""
    min_top10_overlap: Share
    """Mean share of the ten most likely tokens that both engines agree on, per workload."""
    max_ppl_ratio: Annotated[float, Field(ge=1)]
    """Candidate's perplexity over the baseline's, per workload."""
    max_rms_delta_p: Share
    """Root mean square change of the reference token's probability, per workload."""
    max_kl_slope: Positive
    """Growth of the mean KL per 1,000 tokens of context."""

    def margin_of(self, workload: str) -> float:
        return self.margins.get(workload, self.margin)

    def check_margins(self, workloads: Collection[str]) -> None:
        """Raise UserError for a margin of something else than `workloads`, those that have answers."""
        for name, margin in self.margins.items():
            if name not in workloads:
                those = ", ".join(sorted(workloads)) or "none of the workloads"
                raise UserError(f"gates.margins.{name}={margin:g}: {name} has no answers to judge; {those} could have a margin")


class Check(BaseModel):
    """One line of the verdict's table."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    gate: str
    """Metric, as named under `gates.` where it has a threshold there."""
    where: str
    """Workload, `workload [low, high)`, or "all"."""
    value: float | None
    bound: float | None
    """The one-sided bound that was compared with the threshold: the one nearer to the other verdict."""
    threshold: float | None
    status: Status
    reason: str


class Verdict(BaseModel):
    """What the gates say, and why."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    status: Status
    reasons: list[str]
    """What failed, else what is open, else what was shown; answers first, distances after them."""
    checks: list[Check]
    samples_needed: dict[str, int]
    """Inconclusive workload, or "all" -> samples that would decide it if its rates stay what they are."""


def decide(report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates) -> Verdict:
    """Judge one evaluation. `rows` are the report's samples.

    Raises:
        UserError: for a margin of a workload that has no answers.
    """
    from pipeline import accuracy, trials  # not at the top: the command line reads `Gates` before it may load scipy

    checks = trials.completeness(report, rows)
    needed: dict[str, int] = {}
    if not any(check.status == "FAIL" for check in checks):
        gates.check_margins({row.workload for row in rows if row.judged})
        judged, needed = accuracy.accuracy(rows, gates)
        checks += judged
        checks += accuracy.accuracy_by_bin(report, rows, gates)
        unjudged = trials.evidence(rows, gates)
        checks += unjudged
        needed |= {check.where: gates.min_samples for check in unjudged if check.status == "INCONCLUSIVE"}
        checks += trials.fidelity(rows, gates)
        checks += trials.tail_and_slope(report, rows, gates)
        checks += trials.noise(report, gates)
        checks += trials.canary(report, gates)
    return _conclude(checks, needed)


def _conclude(checks: Sequence[Check], needed: Mapping[str, int]) -> Verdict:
    by_status: Callable[[Status], list[str]] = lambda status: [c.reason for c in checks if c.status == status]  # noqa: E731
    failed, open_ = by_status("FAIL"), by_status("INCONCLUSIVE")
    status: Status = "FAIL" if failed else "INCONCLUSIVE" if open_ else "PASS"
    shown = [check.reason for check in checks if check.gate == "accuracy"] or [check.reason for check in checks]
    return Verdict(status=status, reasons=failed or open_ or shown, checks=list(checks), samples_needed=dict(needed))


def finite(value: float | None) -> float | None:
    """None for what JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
