"""What a baseline can do: kinds of work whose right answers it hardly gives, so that no candidate could lose any."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pipeline.core.errors import CannotBeJudged
from stages.evaluate.decoding.rows import probability
from stages.evaluate.decoding.stored import Round
from stages.evaluate.inputs.tokens import EncodedSample


@dataclass(frozen=True)
class Ability:
    """How a baseline answers the questions of one kind of work in a round."""

    workload: str
    asked: int
    right: int
    probability: float
    """Of the right answers, in the mean."""

    def __str__(self) -> str:
        """Return `1 of 60 questions of lookup (0.4 % probable in the mean)`."""
        return (
            f"{self.right} of {self.asked} questions of {self.workload} ({100 * self.probability:.2g} % probable in the mean)"
        )


def abilities(encoded: Sequence[EncodedSample], measured: Round) -> list[Ability]:
    """Return how the baseline answers each kind of work of a round, sorted by name.

    Args:
        encoded: The samples of the round.
        measured: The baseline's answers to them, and the statistics of its scored tokens.
    """
    scored = measured.scored(encoded)
    found: dict[str, list[tuple[bool, float]]] = {}
    for item, answer, steps in zip(scored, measured.answers_to(scored), measured.statistics_of(scored), strict=True):
        if answer is not None:
            kind = found.setdefault(item.sample.workload, [])
            kind.append((answer.judgement.correct, probability(steps.baseline_nll, item)))
    return [
        Ability(name, len(kind), sum(right for right, _ in kind), fmean(chance for _, chance in kind))
        for name, kind in sorted(found.items())
    ]


def require_able(encoded: Sequence[EncodedSample], measured: Round, least: float) -> None:
    """Refuse questions that the baseline cannot answer, before any candidate is asked.

    Args:
        encoded: The samples of the first round.
        measured: The baseline's answers to them.
        least: `gates.min_baseline_probability`.

    Raises:
        CannotBeJudged: where right answers of a kind of work are less probable in the mean.
    """
    found = abilities(encoded, measured)
    weak = [one for one in found if not one.probability >= least]
    if weak:
        kinds = "this kind of work" if len(weak) == 1 else "these kinds of work"
        said = f"FP16 itself answers {'; '.join(map(str, weak))}: {kinds} cannot be judged, and no candidate was run"
        raise CannotBeJudged(said, [one.workload for one in weak], [one.workload for one in found if one not in weak])
