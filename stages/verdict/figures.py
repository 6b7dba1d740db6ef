"""Building blocks of gates: the evidence that they read, the figures that a bet decides, and the lines that they write."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stages.verdict.bets import Array, Mean, Result, document_sums
from stages.verdict.report import EvaluationReport, SampleRow
from stages.verdict.verdict import Check, Gate

MIN_SOUND_REQUESTS = 60
"""Number of requests that pass `max_ruined_share` if none is ruined, although the statistical proof needs 161 documents."""


@dataclass(frozen=True)
class GateInput:
    """The input of a gate: a report, and the samples of all rounds or of the first rounds."""

    report: EvaluationReport
    rows: Sequence[SampleRow]

    @property
    def judged(self) -> list[SampleRow]:
        return [row for row in self.rows if row.judged]


def by_workload(rows: Iterable[SampleRow]) -> dict[str, list[SampleRow]]:
    workloads: dict[str, list[SampleRow]] = {}
    for row in rows:
        workloads.setdefault(row.workload, []).append(row)
    return dict(sorted(workloads.items()))


def means(rows: Sequence[SampleRow], values: Sequence[float | None], weights: Sequence[float] | None = None) -> Array:
    """Return the weighted mean of every document, shape (documents,); NaN for documents with a missing value."""
    weights = weights or [1.0] * len(rows)
    with np.errstate(over="ignore"):  # a sum that overflows is infinite, which fails a gate
        sums, total = document_sums([row.document for row in rows], np.asarray(values, np.float64) * weights, weights)
        return sums / total


def describe_recovery(value: float, bound: float, status: str) -> str:
    """Return a clause with a recovery and its bound, both given as shares."""
    judgement = {"PASS": "at least", "FAIL": "at most"}.get(status, "the questions show only that it is at least")
    return f"keeps {100 * value:.1f} % of the probability of right answers ({judgement} {100 * bound:.1f} %)"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A mean over documents that a bet decides."""

    gate: Gate
    where: str
    mean: Mean
    threshold: float
    label: str = ""
    to_shown: Callable[[float], float] = float
    """Converts a mean to the unit of the threshold, for messages."""
    must_pass: bool = True
    """Whether a PASS of the verdict needs a PASS of this figure. False for a figure that can only fail, because its PASS would
    need more documents than an evaluation has. Such a figure has a line only if it fails."""
    sound_requests: int = 0
    """Number of requests, if the figure is a share of faulty requests and no request is faulty; else 0. MIN_SOUND_REQUESTS
    sound requests are enough for a PASS."""
    bet_share: float = 1.0
    student_share: float = 0.0
    """Share of a PASS's level for Student's t at the last look."""

    def test(self, fail_level: float, pass_level: float, *, last: bool) -> Result:
        """Test the figure. `last`: whether this is the last planned look."""
        t_level = self.student_share * pass_level if last else 0.0
        result = self.mean.test(fail_level, self.bet_share * pass_level, t_level)
        passes = result.decision is None and self.sound_requests >= MIN_SOUND_REQUESTS
        return replace(result, decision="PASS") if passes else result

    def check(self, result: Result) -> Check:
        value = self.to_shown(result.value)
        bound = self.to_shown(result.bound)
        judgement = {"PASS": "within", "FAIL": "outside", None: "not clearly within"}[result.decision]
        side = "at least" if self.to_shown(1.0) < self.to_shown(0.0) else "at most"
        text = (
            f"{self.label} {value:.4g}{self._uncapped_clause(result)}, {100 * (1 - result.level):.4g} % bound {bound:.4g}, "
            f"{judgement} {self.gate} ({side} {self.threshold:g})"
        )
        if result.decision == "PASS" and self.sound_requests and result.bound > self.threshold:
            text = (
                f"{self.label} 0; {MIN_SOUND_REQUESTS} requests without a ruined one are enough for a PASS, although "
                f"{len(self.mean.values)} documents show only a share of at most {bound:.3g} ({100 * (1 - result.level):.4g} % "
                f"bound), not {self.gate} ({self.threshold:g})"
            )
        status = result.decision or "INCONCLUSIVE"
        return Check.of(self.gate, self.where, status=status, text=text, value=value, threshold=self.threshold, bound=bound)

    def _uncapped_clause(self, result: Result) -> str:
        """Return a clause with the uncapped mean, which tables and charts show; "" if no document is capped."""
        values, cap = self.mean.values, self.mean.cap
        if result.decision == "FAIL" or not (values > cap).any():
            return ""
        uncapped = self.to_shown(float(values.mean()))
        return f" with documents capped at {self.to_shown(cap):.3g} ({uncapped:.4g} without the cap)"
