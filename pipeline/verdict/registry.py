"""What a gate is: a function of the evidence that is declared once. Whatever names gates goes by `GATES` and `LINES`."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Check, Limits

if TYPE_CHECKING:
    from pipeline.statistics.looks import Look

L = TypeVar("L", bound=Limits)


@dataclass(frozen=True)
class Evidence:
    """What a gate judges: an evaluation, or what was run of it up to a look."""

    report: EvaluationReport
    rows: Sequence[SampleRow]
    """The samples, those of later rounds left out."""
    look: "Look"
    """The look at these samples; for a gate that does not look, the last one."""
    together: int = 1
    """Distances that are tested together, which share `alpha` for a FAIL."""

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


Judge = Callable[[Evidence, L], Iterable[Check]]
Needed = Callable[[Evidence, L, Collection[str]], Mapping[str, int]]


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
    always_said: bool = False
    """Whether its reason is among those of every verdict."""


@dataclass(frozen=True)
class Gate:
    """A gate. Its functions take the thresholds of `limits`, which all gates' thresholds together are."""

    check: Judge[Any]
    limits: type[Limits]
    """What it goes by: the thresholds that it adds to those of all gates."""
    lines: Mapping[str, Line]
    rank: int
    """Its place in a verdict. Those that look are next to each other."""
    looks: bool = False
    """Whether it looks at the growing samples, after each round. The others judge the report as it stands."""
    stops: bool = False
    """Whether nothing else can be judged where it fails."""
    is_main: bool = False
    """Whether a PASS is for its reasons. Its open lines say how many samples would decide."""
    tests: Callable[[EvaluationReport, Sequence[SampleRow]], int] | None = None
    """How many of the distances that are tested together are its own."""
    needed: Needed[Any] | None = None
    """From the places of open lines to samples, by place, with which the next attempt would decide if rates stay the same."""


GATES: list[Gate] = []
"""All gates, in the order of a verdict's lines."""
LINES: dict[str, Line] = {}
"""All kinds of lines, by their keys."""


def gate(limits: type[L], lines: Mapping[str, Line], rank: int, **how: Any) -> Callable[[Judge[L]], Judge[L]]:
    """Declare the function below to be a gate. Arguments: the fields of `Gate`."""

    def declare(check: Judge[L]) -> Judge[L]:
        GATES.append(Gate(check, limits, lines, rank, **how))
        GATES.sort(key=lambda one: one.rank)
        LINES.update(lines)
        return check

    return declare
