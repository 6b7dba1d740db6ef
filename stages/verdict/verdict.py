"""The records of a verdict: its status, its lines and the kinds of lines. The gates are in `stages.verdict.gates`."""

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field

from stages.core.records import Number, Record, finite

RULES = 30
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
    NOISE_FLOOR = "noise_floor", "A/A noise", False
    MUST_FAIL_CONTROL = "must_fail_control", "Must-fail control", False
    CONFORMANCE = "conformance", "Conformance", False
    STRESS_TEST = "stress_test", "Stress test"
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
