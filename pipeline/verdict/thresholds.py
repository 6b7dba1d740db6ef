"""The gates' thresholds (`gates.*` on the command line) and the record of a verdict. `pipeline.verdict.gates` decides."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field

from pipeline.core.errors import UserError
from pipeline.core.strict import StrictModel
from pipeline.verdict.record import Record

RULES = 5
"""Version of the gates' rules. 1: one look at all samples, and Holm's procedure for PASS as well as for FAIL. 2: bootstraps of
distances, a tail and a slope that passed where they did not fail, and flips of a document taken to be alike. 3: counts
of samples that share documents were rounded against the candidate, and an INCONCLUSIVE asked for other numbers of samples.
4: an INCONCLUSIVE asked for more samples where answers were open alone, and a FAIL asked for some."""

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


class Gates(StrictModel):
    """Thresholds, `gates.*` on the command line. They are compared with raw values; only texts are rounded."""

    alpha: Annotated[float, Field(gt=0, le=0.2)]
    """One-sided error: of a wrong PASS in all looks together, and of a wrong FAIL in all looks and workloads together."""
    attempt: Annotated[int, Field(ge=1, le=20)] = 1
    """Which evaluation of a candidate it is: the one after an INCONCLUSIVE has the next number. `pass_alpha` shares alpha."""
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
    """Mean KL(baseline || candidate) per workload, nats per token; a request counts as four times this at most."""
    max_ruined_share: Margin = 0.025
    """Share of the requests whose mean KL is above four times `max_mean_kl`. Evidence of rules before 3 lacks it."""
    max_p999_kl: Positive
    """99.9th percentile of the KL over all tokens."""
    min_top10_overlap: Annotated[float, Field(ge=0, lt=1)]
    """Mean share of the ten most likely tokens that both engines agree on, per workload."""
    max_ppl_ratio: Annotated[float, Field(gt=1)]
    """Candidate's perplexity over the baseline's, per workload."""
    max_rms_delta_p: Annotated[float, Field(gt=0, le=1)]
    """Root mean square change of the reference token's probability, per workload."""
    max_kl_slope: Positive
    """Growth of the mean KL per 1,000 tokens of context."""
    max_acceptance_loss: Margin = 0.1
    """Share of the baseline's acceptance length under speculative decoding that a candidate may lose, per workload and drafter,
    where `workloads.speculation` measures it. Evidence from before it was measured lacks it."""
    allow_scale_changes: Annotated[tuple[ScaleChangeKind, ...], Field(strict=False)] = ()
    """What another library may do to the scales of a checkpoint. Anything else is refused before it is judged."""

    @property
    def pass_alpha(self) -> float:
        """What a wrong PASS in all looks of this attempt may err with: over all attempts together it is `alpha` at most.

        The first has 9/10 of it, each later one half of what is left then.
        """
        return self.alpha * ((1 - RESERVED) if self.attempt == 1 else RESERVED / 2 ** (self.attempt - 1))

    @property
    def next_attempt(self) -> "Gates":
        """The gates of the evaluation after this one."""
        return self.model_copy(update={"attempt": self.attempt + 1})

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


class Check(Record):
    """One line of the verdict's table."""

    gate: str
    """Its key under `gates.` where it has a threshold there, else the name of the metric."""
    where: str
    """Workload, `workload [low, high)`, or "all"."""
    value: float | None
    bound: float | None
    """The one-sided bound that was compared with the threshold."""
    threshold: float | None
    status: LineStatus
    reason: str


class Detectable(Record):
    """What an evaluation of this size can tell of one workload, in accuracy lost, as a fraction; null where it cannot."""

    fails_from: float | None
    """A true loss of this much or more fails with `gates.power`."""
    passes_up_to: float | None
    """A true loss of this much or less passes with `gates.power`; the flips beside it are those that were seen."""

    @property
    def text(self) -> str:
        """Both in points of accuracy."""
        passes = "no loss passes" if self.passes_up_to is None else f"a loss of {100 * self.passes_up_to:.1f} points passes"
        fails = "none fails" if self.fails_from is None else f"one of {100 * self.fails_from:.1f} fails"
        return f"{passes}, {fails}"


class Verdict(Record):
    """The decision of the gates, and its reasons."""

    status: Status
    reasons: list[str]
    """Those of the failed checks, else of the inconclusive ones, else of the passed ones; answers first, then distances."""
    checks: list[Check]
    warnings: list[str] = Field(default=[])
    """What was not shown and keeps no candidate from passing."""
    detectable: dict[str, Detectable] = Field(default={})
    """The minimum detectable effect of each workload that has answers. Evidence of rules before 3 lacks it."""
    samples_needed: dict[str, int]
    """Of an INCONCLUSIVE: workload, or "all" -> samples with which the next attempt would decide it if its rates stay the same.
    Workloads that passed are among them where the next attempt, which errs with less, would leave them open."""
    round: int = 1
    """The last look, from 1, that was taken at the samples; 0 where none was."""
    covered: str | None = None
    """How far it holds: `up to 1,024 tokens, batch 16`. Evidence from before it was recorded lacks it."""
    rules: int = 1
    """`RULES` of the gates that decided. Evidence from before it was recorded lacks it."""
