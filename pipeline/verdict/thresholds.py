"""The thresholds of all gates, and the record of a verdict. `pipeline.verdict.gates` has the gates and decides."""

from typing import Annotated, Literal, Self

from pydantic import Field

from pipeline.core.strict import StrictModel
from pipeline.verdict.record import Record

RULES = 13
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


class Gates(StrictModel):
    """The thresholds of the gates, `gates.*` on the command line. They are compared with raw values; only texts are rounded.

    Those of distances are four times what sound caches of a real model show: SmolLM2 at FP8 has a mean KL of 0.006, with INT4
    values 0.012, while INT4 keys and values in groups of 32, which lose answers, have 0.08 (`make real`).
    """

    alpha: Annotated[float, Field(gt=0, le=0.2)] = 0.05
    """Error: of a wrong PASS of a gate in all looks together, and of a wrong FAIL in all looks and gates together."""
    attempt: Annotated[int, Field(ge=1, le=20)] = 1
    """Number of this evaluation of a candidate. The evaluation after an INCONCLUSIVE has the next number, and less alpha."""
    min_samples: Annotated[int, Field(ge=1)] = 15
    """Documents that a kind of work needs for a PASS, and a report without answers as a whole."""
    min_recovery: Margin = 0.95
    """Share of the probability of right answers that the candidate keeps, over all questions: llm-compressor's rule."""
    min_workload_recovery: Margin = 0.8
    """The same for each kind of work. It is what 15 questions can show without passing broken caches."""
    min_baseline_probability: Share = 0.02
    """A kind of work whose right answers are less probable under the baseline, in the mean, has nothing to lose: no PASS."""
    margin: Margin = 0.05
    """Greedy answers that a candidate may lose, as a fraction: 0.05 is five points. More is a FAIL."""
    max_acceptance_loss: Margin = 0.1
    """Share of the baseline's acceptance length under speculative decoding that a candidate may lose, per workload and drafter,
    where `workloads.speculation` measures it."""
    max_mean_kl: Positive = 0.05
    """Mean KL(baseline || candidate) per workload, nats per token; a request counts as three times this at most."""
    min_top10_overlap: Annotated[float, Field(ge=0, lt=1)] = 0.8
    """Mean share of the ten most likely tokens that both engines agree on, per workload. SmolLM2 at FP8: 0.95."""
    max_ppl_ratio: Annotated[float, Field(gt=1)] = 1.05
    """Candidate's perplexity over the baseline's, per workload. SmolLM2 at FP8: 1.005."""
    max_ruined_share: Margin = 0.025
    """Share of the requests whose mean KL is above three times `max_mean_kl`, where there are any. Without any, 60 requests are
    enough for a PASS, and show that at most 5 % of independent ones are."""
    max_p999_kl: Positive = 1.0
    """KL that no more than a token in a thousand may exceed; more is a FAIL. INT4 in groups of 32 on SmolLM2: 2.9."""
    allow_scale_changes: Annotated[tuple[ScaleChangeKind, ...], Field(strict=False)] = ()
    """What another library may do to the scales of a checkpoint. Anything else is refused before it is judged."""

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
