"""Building blocks of gates: the evidence that they read, the figures that a bet decides, and the lines that they write."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np

from stages.verdict.bets import Array, Mean, Result, document_sums
from stages.verdict.report import EvaluationReport, SampleRow
from stages.verdict.thresholds import FAR_KL, Check, Thresholds

ALL = "all"
"""Place of a line on all workloads together."""
_CUT = "; for a PASS, a document counts as three times the limit at most"


class Gate(StrEnum):
    """The kinds of verdict lines, in the order of a verdict. A threshold under `gates.` has the key of its line."""

    heading: str
    says: str
    """Meaning of the line's value."""
    samples_decide: bool
    """Whether more samples can decide an INCONCLUSIVE line."""

    def __new__(cls, key: str, heading: str = "", says: str = "", samples_decide: bool = True) -> Self:
        gate = str.__new__(cls, key)
        gate._value_, gate.heading, gate.says, gate.samples_decide = key, heading, says, samples_decide
        return gate

    COMPLETE = "complete", "Complete", "nothing where all samples are whole"
    RECOVERY = "min_recovery", "Recovery", "share of the probability of right answers that is kept"
    ACCURACY = "accuracy", "Right answers", "points that the policy gains or loses against FP16"
    ACCEPTANCE = "max_acceptance_loss", "Acceptance loss", "share of the tokens a pass under speculative decoding"
    MIN_SAMPLES = "min_samples", "Documents", "per planned workload; if no question has an answer, over all workloads"
    MEAN_KL = "max_mean_kl", "Mean KL", f"nats per token from FP16{_CUT}"
    TOP10_OVERLAP = "min_top10_overlap", "Top-10 overlap", f"share of the ten most likely tokens that both agree on{_CUT}"
    RUINED = "max_ruined_share", "Ruined requests", "share whose mean KL is beyond three times its limit"
    FAR_TOKENS = "max_p999_kl", "Far tokens", f"share of the tokens with a KL above {FAR_KL:g}"
    NOISE_FLOOR = "noise_floor", "A/A noise", "distance of an engine from itself", False
    MUST_FAIL_CONTROL = "must_fail_control", "Must-fail control", "mean KL with corrupted key scales", False
    CONFORMANCE = "conformance", "Conformance", "distance from the reference engine, as a share of rounding", False
    STRESS_TEST = "stress_test", "Stress test", "sequences of random tokens that deviate from the reference engine"
    ALLOCATION = "allocation", "Allocation", "bytes that differ from the policy's"
    FREE_ANSWERS = "free_answers", "Free answers", "samples whose free answer contradicts the forced one"
    SCALE_DELIVERY = "scale_delivery", "Delivered scales", "scales that are not the checkpoint's"
    FULL_POOL = "full_pool", "Full pool", "requests that a full pool changes beyond noise", False
    TAKES_EFFECT = "takes_effect", "Long enough", "tokens of the longest sample", False


@dataclass(frozen=True)
class GateInput:
    """The input of a gate: a whole evaluation, or its samples up to some round."""

    report: EvaluationReport
    rows: Sequence[SampleRow]
    """The samples, without those from later rounds."""

    @property
    def judged(self) -> list[SampleRow]:
        """The samples that have answers."""
        return [row for row in self.rows if row.judged]


def by_workload(rows: Iterable[SampleRow]) -> dict[str, list[SampleRow]]:
    """Return the samples by workload, sorted by the workload's name."""
    found: dict[str, list[SampleRow]] = {}
    for row in rows:
        found.setdefault(row.workload, []).append(row)
    return dict(sorted(found.items()))


def means(rows: Sequence[SampleRow], values: Sequence[float | None], weights: Sequence[float] | None = None) -> Array:
    """Return the weighted mean of every document, shape (documents,); NaN for documents with a missing value."""
    weights = weights or [1.0] * len(rows)
    with np.errstate(over="ignore"):  # a sum that no float64 holds is infinite, which fails a gate
        sums, total = document_sums([row.document for row in rows], np.asarray(values, np.float64) * weights, weights)
        return sums / total


def kept(value: float, bound: float, status: str) -> str:
    """Return a clause with a recovery and its bound, both given as shares."""
    judgement = {"PASS": "at least", "FAIL": "at most"}.get(status, "the questions show only that it is at least")
    return f"keeps {100 * value:.1f} % of the probability of right answers ({judgement} {100 * bound:.1f} %)"


@dataclass(frozen=True)
class Figure:
    """A mean over documents that a bet decides."""

    gate: str
    where: str
    mean: Mean
    threshold: float
    """Threshold as configured."""
    label: str = ""
    shown: Callable[[float], float] = float
    """Converts a mean to the unit of the threshold, for messages."""
    must_pass: bool = True
    """False for a figure that can only fail. It has no line otherwise, because showing a PASS takes more documents than an
    evaluation has."""

    def test(self, fail_level: float, thresholds: Thresholds, *, last: bool) -> Result:  # noqa: ARG002  # of `Recovery`
        """Test the figure.

        Args:
            fail_level: The error of a wrong FAIL.
            thresholds: The thresholds, with the error of a wrong PASS.
            last: Whether this is the last planned look.
        """
        return self.mean.test(fail_level, thresholds.pass_alpha)

    def check(self, result: Result, thresholds: Thresholds) -> Check:  # noqa: ARG002  # of `Recovery`
        """Return the verdict line for a test's result."""
        value, bound = self.shown(result.value), self.shown(result.bound)
        judgement = {"PASS": "within", "FAIL": "outside", None: "not clearly within"}[result.decision]
        side = "at least" if self.shown(1.0) < self.shown(0.0) else "at most"
        text = (
            f"{self.label} {value:.4g}{self._uncut(result)}, {100 * (1 - result.level):.4g} % bound {bound:.4g}, "
            f"{judgement} {self.gate} ({side} {self.threshold:g})"
        )
        status = result.decision or "INCONCLUSIVE"
        return Check.of(self.gate, self.where, status, text, value, self.threshold, bound)

    def _uncut(self, result: Result) -> str:
        """Return a clause with the mean without the cap on outliers, which tables and charts show; "" if no value is capped."""
        values, cap = self.mean.values, self.mean.cap
        if result.decision == "FAIL" or not (values > cap).any():
            return ""
        whole = self.shown(float(values.mean()))
        return f" where a document counts as {self.shown(cap):.3g} at most ({whole:.4g} whole)"
