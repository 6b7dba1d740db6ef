"""The thresholds of the gates, and the records of a verdict: its status, its lines and the kinds of lines.

The gates are in `stages.verdict.gates`.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field

from stages.core.records import Number, Record, finite
from stages.core.strict import StrictModel
from stages.policies.scales import ScaleChangeKind

RULES = 31
"""Version of the gates' rules. Evidence of a verdict by another version is refused."""

ALL = "all"
"""`Check.where` of a line on all workloads together."""

Status = Literal["PASS", "FAIL", "INCONCLUSIVE"]
LineStatus = Literal["PASS", "FAIL", "INCONCLUSIVE", "WARNING"]
"""Status of one line of the verdict's table. A WARNING does not affect the verdict."""


class Gate(StrEnum):
    """The kinds of verdict lines, in the order of a verdict. A threshold under `gates.` has the key of its line."""

    heading: str
    samples_decide: bool
    """Whether more samples can decide an INCONCLUSIVE line."""

    def __new__(cls, key: str, heading: str = "", samples_decide: bool = True) -> Self:
        gate = str.__new__(cls, key)
        gate._value_ = key
        gate.heading = heading
        gate.samples_decide = samples_decide
        return gate

    COMPLETE = "complete", "Complete"
    RECOVERY = "min_recovery", "Recovery"
    ACCURACY = "accuracy", "Right answers"
    ACCEPTANCE = "max_acceptance_loss", "Acceptance loss"
    MIN_SAMPLES = "min_samples", "Documents"
    MEAN_KL = "max_mean_kl", "Mean KL"
    TOP10_OVERLAP = "min_top10_overlap", "Top-10 overlap"
    RUINED = "max_ruined_share", "Ruined requests"
    FAR_TOKENS = "max_far_token_share", "Far tokens"
    NOISE_FLOOR = "noise_floor", "Noise floor", False
    MUST_FAIL_CONTROL = "must_fail_control", "Must-fail control", False
    CONFORMANCE = "conformance", "Conformance", False
    STRESS_TEST = "stress_test", "Stress test", False
    ALLOCATION = "allocation", "Allocation"
    FREE_ANSWERS = "free_answers", "Free answers"
    SCALE_DELIVERY = "scale_delivery", "Delivered scales"
    FULL_POOL = "full_pool", "Full pool", False
    TAKES_EFFECT = "takes_effect", "Long enough", False


class Check(Record):
    gate: Gate
    where: str
    """Subject of the line: "all", a workload, a context bin (`workload [low, high)`), or a workload and a drafter. Tests of an
    engine write "candidate" or "baseline". Two gates write a fixed text, such as "A/A noise"."""
    value: float | None
    bound: float | None = None
    """One-sided bound that was compared with the threshold."""
    threshold: float | None = None
    status: LineStatus
    reason: str

    @classmethod
    def of(
        cls,
        gate: Gate,
        where: str,
        *,
        status: LineStatus,
        text: str,
        value: Number = None,
        threshold: float | None = None,
        bound: Number = None,
    ) -> Self:
        """Return a line with the reason `{where}: {text}`. Numbers that are not finite become null."""
        reason = f"{where}: {text}"
        return cls(
            gate=gate, where=where, value=finite(value), bound=finite(bound), threshold=threshold, status=status, reason=reason
        )


class Verdict(Record):
    status: Status
    reasons: list[str]
    """Reasons of the failed checks for a FAIL, and of the inconclusive checks for an INCONCLUSIVE. A PASS lists the reasons of
    the checks on recovery, or of all checks if none is about recovery."""
    checks: list[Check]
    warnings: list[str] = Field(default=[])
    samples_needed: int = 0
    """For an INCONCLUSIVE verdict: number of samples, of all workloads in the present proportions, that would decide the next
    attempt if the rates stay the same. 0 if no number is known to decide it."""
    round: int = 1
    """Number of the last round whose samples were judged, from 1; 0 if the samples are incomplete."""
    covered: str | None = None
    """Limits of the verdict: `up to 1,024 tokens, batch 16`."""
    rules: int = RULES


MAX_SAMPLES = 1_000_000
"""Maximum number of samples that an INCONCLUSIVE suggests."""

MAX_ATTEMPTS = 20

ALPHA = 0.05
"""Error probability of a wrong PASS of a gate over all rounds and attempts, and of a wrong FAIL over all rounds and gates."""

RESERVED = 0.1
"""Share of ALPHA that is reserved for evaluations after an INCONCLUSIVE."""

MARGIN = 0.05
"""Maximum fraction of greedy answers that a candidate may lose. It is not configurable: greedy answers flip by chance, and
recovery has its own thresholds."""

MIN_TOP10_OVERLAP = 0.8
"""Minimum mean share of the baseline's ten most likely tokens that are among the candidate's ten. SmolLM2 has 0.95 at FP8; the
must-fail control must be below."""

FAR_KL = 1.0
"""KL in nats that at most one token in a thousand may exceed. For INT4 in groups of 32 on SmolLM2, this KL is 2.9."""

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Margin = Annotated[float, Field(gt=0, lt=1)]


class Thresholds(StrictModel):
    """The thresholds of the gates, `gates.*` on the command line. They are compared with raw values; only messages are rounded.

    The thresholds of distances are at least four times the distances of sound caches of a real model. Over running text, the
    mean KL of SmolLM2 is 0.008 at FP8 and 0.011 with INT4 values. INT4 keys and values in groups of 32, which lose answers,
    have 0.13 (docs/numerics.md).
    """

    attempt: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] = 1
    """Number of this evaluation of a candidate. After an INCONCLUSIVE use the next number, which makes a PASS harder."""
    min_samples: Annotated[int, Field(ge=1)] = 15
    """Minimum documents for a PASS, per workload; for a report without answers, over all workloads."""
    min_recovery: Margin = 0.95
    """Minimum share of the probability of right answers that is kept, over all questions. The limit is that of llm-compressor's
    lm-eval tests, whose recovery is a ratio of benchmark scores."""
    min_workload_recovery: Margin = 0.8
    """Minimum share per workload. 15 documents can show this share without passing broken caches."""
    min_baseline_probability: Share = 0.02
    """Minimum mean probability of right answers under the baseline. A workload below it cannot PASS, since it has little to
    lose."""
    max_acceptance_loss: Margin = 0.1
    """Maximum share of the baseline's acceptance length under speculative decoding that a candidate may lose, per workload and
    drafter, if `workloads.speculation` measures it."""
    max_mean_kl: Positive = 0.05
    """Maximum mean KL(baseline || candidate) per workload, nats per token; a document counts at most three times this."""
    max_ruined_share: Margin = 0.025
    """Maximum share of ruined requests. The mean KL of a ruined request is above three times `max_mean_kl`. 60 requests
    suffice for a PASS if none is ruined. This shows only that the share is below 7 % (60 documents) or below 30 % (15
    documents)."""
    allow_scale_changes: Annotated[tuple[ScaleChangeKind, ...], Field(strict=False)] = ()
    """Accepted changes that another library makes to the scales of a checkpoint. Other changes are refused before judging."""

    @property
    def pass_alpha(self) -> float:
        """Maximum probability of a wrong PASS over all looks of this attempt; over all attempts it is at most ALPHA.

        The first attempt has 9/10 of ALPHA, and every later one half of the remainder.
        """
        return ALPHA * ((1 - RESERVED) if self.attempt == 1 else RESERVED / 2 ** (self.attempt - 1))

    @property
    def next_attempt(self) -> Self | None:
        """These thresholds, for the next attempt; None after the last attempt."""
        return self.model_copy(update={"attempt": self.attempt + 1}) if self.attempt < MAX_ATTEMPTS else None
