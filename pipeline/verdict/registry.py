"""What gates are made of: the evidence that they read, the figures that a bet decides, and the lines that they write."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.verdict.record import finite
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Check, Gates

if TYPE_CHECKING:
    from pipeline.statistics.bets import Mean, Result


@dataclass(frozen=True)
class Evidence:
    """What a gate judges: an evaluation, or what was run of it up to a look."""

    report: EvaluationReport
    rows: Sequence[SampleRow]
    """The samples, those of later rounds left out."""

    @property
    def judged(self) -> list[SampleRow]:
        """The samples that have answers."""
        return [row for row in self.rows if row.judged]


def by_workload(rows: Iterable[SampleRow]) -> dict[str, list[SampleRow]]:
    """Return samples by workload, in the order of the workloads' names."""
    found: dict[str, list[SampleRow]] = {}
    for row in rows:
        found.setdefault(row.workload, []).append(row)
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Figure:
    """A mean over documents that a bet decides."""

    gate: str
    where: str
    mean: "Mean"
    threshold: float
    """As it is configured."""
    label: str = ""
    shown: Callable[[float], float] = float
    """From a mean to what is configured and shown."""
    must_pass: bool = True
    """False for a figure that can fail and otherwise has no line: too few documents could show that it is within its limit."""

    def test(self, fail_level: float, gates: Gates, *, last: bool) -> "Result":  # noqa: ARG002  # of `Recovery`
        """Test the figure.

        Args:
            fail_level: The error of a wrong FAIL.
            gates: The thresholds, with the error of a wrong PASS.
            last: Whether this is the last planned look.
        """
        return self.mean.test(fail_level, gates.pass_alpha)

    def check(self, result: "Result", gates: Gates) -> Check:  # noqa: ARG002  # of `Recovery`
        """Return the line of a test's result."""
        value, bound = self.shown(result.value), self.shown(result.bound)
        judgement = {"PASS": "within", "FAIL": "outside", None: "not clearly within"}[result.decision]
        side = "at least" if self.gate.startswith("min_") else "at most"
        reason = (
            f"{self.where}: {self.label} {value:.4g}{self._uncut(result)}, {100 * (1 - result.level):.4g} % bound {bound:.4g}, "
            f"{judgement} {self.gate} ({side} {self.threshold:g})"
        )
        return self.line(result, value, bound, reason)

    def line(self, result: "Result", value: float, bound: float, reason: str) -> Check:
        """Return a line, INCONCLUSIVE where the test decided nothing."""
        return Check(
            gate=self.gate,
            where=self.where,
            value=finite(value),
            bound=finite(bound),
            threshold=self.threshold,
            status=result.decision or "INCONCLUSIVE",
            reason=reason,
        )

    def _uncut(self, result: "Result") -> str:
        """Say what the mean is with outliers whole, as tables and charts have it; nothing where none is cut."""
        values, cap = self.mean.values, self.mean.cap
        if result.decision == "FAIL" or not (values > cap).any():
            return ""
        whole = self.shown(float(values.mean()))
        return f" where a document counts as {self.shown(cap):.3g} at most ({whole:.4g} whole)"


@dataclass(frozen=True)
class Line:
    """One kind of line that a gate writes. Its key is that of its threshold below `gates.` where it has one of that name."""

    title: str
    says: str
    """What its value is."""
    per: Literal["workload", "all", "engine"]
    """What it judges by itself."""
    equal: float = 0.0
    """The value of an engine that is equal to the baseline."""
    samples_decide: bool = True
    """Whether more samples may decide what is INCONCLUSIVE."""


@dataclass(frozen=True)
class Gate:
    """A gate, which has figures or checks."""

    lines: Mapping[str, Line]
    """By their keys."""
    figures: Callable[[Evidence, Gates], Iterable[Figure]] | None = None
    """Returns what is tested after each round."""
    check: Callable[[Evidence, Gates], Iterable[Check]] | None = None
    """Judges the report as it stands."""
