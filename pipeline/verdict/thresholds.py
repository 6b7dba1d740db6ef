"""What all gates go by, and the record of a verdict. `pipeline.verdict.gates` has the gates and decides."""

from typing import Annotated, Literal, Self

from pydantic import Field

from pipeline.core.strict import StrictModel
from pipeline.verdict.record import Record

RULES = 11
"""Version of the gates' rules; docs/verdict.md has the table of what each version went by."""

MOST_SAMPLES = 1_000_000
"""Cap of the number of samples that an INCONCLUSIVE asks for; texts say "over a million" there."""

RESERVED = 0.1
"""Share of alpha that is kept for candidates that are evaluated again after an INCONCLUSIVE."""

Status = Literal["PASS", "FAIL", "INCONCLUSIVE"]
LineStatus = Literal["PASS", "FAIL", "INCONCLUSIVE", "WARNING"]
"""Of a line of the verdict's table. A WARNING is read, and decides nothing."""
ScaleChangeKind = Literal["missing", "defaulted", "merged", "swapped", "changed"]
"""How a scale of a checkpoint can arrive in an engine: `pipeline.verdict.delivery`."""
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Margin = Annotated[float, Field(gt=0, lt=1)]


class Limits(StrictModel):
    """Thresholds that all gates go by; each gate adds its own. They are compared with raw values; only texts are rounded."""

    alpha: Annotated[float, Field(gt=0, le=0.2)] = 0.05
    """One-sided error: of a wrong PASS in all looks together, and of a wrong FAIL in all looks and workloads together."""
    attempt: Annotated[int, Field(ge=1, le=20)] = 1
    """Number of this evaluation of a candidate. The evaluation after an INCONCLUSIVE has the next number, and less alpha."""
    power: Annotated[float, Field(ge=0.5, lt=1)] = 0.9
    """Probability with which an engine equal to the baseline passes, for the samples that an INCONCLUSIVE asks for."""
    max_rounds: Annotated[int, Field(ge=1, le=20)] = 5
    """Looks at the growing samples; the last look is at all planned samples."""
    min_samples: Annotated[int, Field(ge=1)] = 15
    """Documents that a kind of work needs for a PASS, and a report without answers as a whole."""

    @property
    def pass_alpha(self) -> float:
        """What a wrong PASS in all looks of this attempt may err with: over all attempts together it is `alpha` at most.

        The first has 9/10 of it, each later one half of what is left then.
        """
        return self.alpha * ((1 - RESERVED) if self.attempt == 1 else RESERVED / 2 ** (self.attempt - 1))

    @property
    def next_attempt(self) -> Self:
        """The gates of the evaluation after this one."""
        return self.model_copy(update={"attempt": self.attempt + 1})


class Check(Record):
    """One line of the verdict's table."""

    gate: str
    """Its key under `gates.` where it has a threshold there, else the name of the metric."""
    where: str
    """Workload, `workload [low, high)`, or "all"."""
    value: float | None
    bound: float | None = None
    """The one-sided bound that was compared with the threshold."""
    threshold: float | None = None
    status: LineStatus
    reason: str


class Verdict(Record):
    """The decision of the gates, and its reasons."""

    status: Status
    reasons: list[str]
    """Those of the failed checks, else of the inconclusive ones, else of the passed ones; answers first, then distances."""
    checks: list[Check]
    warnings: list[str] = Field(default=[])
    """What was not shown and keeps no candidate from passing."""
    samples_needed: dict[str, int]
    """Of an INCONCLUSIVE: workload, or "all" -> samples with which the next attempt would decide it if its rates stay the same.
    Workloads that passed are among them where the next attempt, which errs with less, would leave them open."""
    round: int = 1
    """The last look, from 1, that was taken at the samples; 0 where none was."""
    covered: str | None = None
    """How far it holds: `up to 1,024 tokens, batch 16`. Evidence from before it was recorded lacks it."""
    rules: int = 1
    """`RULES` of the gates that decided. Evidence from before it was recorded lacks it."""
