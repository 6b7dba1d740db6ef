"""The gates' thresholds (`gates.*` on the command line) and the record of a verdict. `pipeline.verdict.gates` decides."""

import math
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipeline.core.errors import UserError
from pipeline.core.strict import StrictModel

RULES = 2
"""Version of the gates' rules. 1: one look at all samples, and Holm's procedure for PASS as well as for FAIL."""

Status = Literal["PASS", "FAIL", "INCONCLUSIVE"]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Margin = Annotated[float, Field(gt=0, lt=1)]


class Gates(StrictModel):
    """Thresholds, `gates.*` on the command line. They are compared with raw values; only texts are rounded."""

    alpha: Annotated[float, Field(gt=0, le=0.2)]
    """One-sided error: of a wrong PASS in all looks together, and of a wrong FAIL in all looks and workloads together."""
    power: Annotated[float, Field(ge=0.5, lt=1)]
    """Probability with which an engine equal to the baseline passes, for the samples that an INCONCLUSIVE asks for."""
    max_rounds: Annotated[int, Field(ge=1, le=20)] = 1
    """Looks at the growing samples; the last is at all that are planned. Evidence from before there were rounds lacks it."""
    margin: Margin
    """Accuracy that a candidate may lose, as a fraction: 0.05 is five points."""
    margins: dict[str, Margin]
    """Margins of single workloads, in place of `margin`."""
    min_samples: Annotated[int, Field(ge=1)]
    """A workload with fewer judged samples cannot pass, nor can a report without answers that has fewer documents."""
    min_baseline_accuracy: Share
    """A workload that the baseline gets right less often cannot pass: the candidate has nothing to lose there."""
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
        """Return the accuracy that a candidate may lose in a workload, as a fraction."""
        return self.margins.get(workload, self.margin)

    def check_margins(self, workloads: Collection[str]) -> None:
        """Check that every margin is one of a workload that has answers.

        Args:
            workloads: The workloads that have answers.

        Raises:
            UserError: for a margin of anything else.
        """
        for name, margin in self.margins.items():
            if name not in workloads:
                names = ", ".join(sorted(workloads)) or "none of the workloads"
                raise UserError(f"gates.margins.{name}={margin:g}: {name} has no answers to judge; {names} could have a margin")


class Check(BaseModel):
    """One line of the verdict's table."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    gate: str
    """Its key under `gates.` where it has a threshold there, else the name of the metric."""
    where: str
    """Workload, `workload [low, high)`, or "all"."""
    value: float | None
    bound: float | None
    """The one-sided bound that was compared with the threshold."""
    threshold: float | None
    status: Status
    reason: str


class Verdict(BaseModel):
    """The decision of the gates, and its reasons."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    status: Status
    reasons: list[str]
    """Those of the failed checks, else of the inconclusive ones, else of the passed ones; answers first, then distances."""
    checks: list[Check]
    samples_needed: dict[str, int]
    """Inconclusive workload, or "all" -> samples that would decide it if its rates stay the same."""
    round: int = 1
    """The last look, from 1, that was taken at the samples; 0 where none was."""
    rules: int = 1
    """`RULES` of the gates that decided. Evidence from before it was recorded lacks it."""


def finite(value: float | None) -> float | None:
    """Return the value, None for one that JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
