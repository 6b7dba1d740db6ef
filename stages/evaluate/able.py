"""What a baseline can do: kinds of work whose right answers it hardly gives, so that no candidate could lose any."""

from collections.abc import Sequence
from statistics import fmean

from pipeline.core.errors import CannotBeJudged
from stages.evaluate.decoding.rows import probability
from stages.evaluate.decoding.stored import Round
from stages.evaluate.inputs.tokens import EncodedSample


def require_able(encoded: Sequence[EncodedSample], measured: Round, least: float) -> None:
    """Refuse questions that the baseline cannot answer, before any candidate is asked.

    Args:
        encoded: The samples of the first round.
        measured: The baseline's answers to them, and the statistics of its scored tokens.
        least: `gates.min_baseline_probability`.

    Raises:
        CannotBeJudged: where right answers of a kind of work are less probable in the mean.
    """
    scored = measured.scored(encoded)
    kinds: dict[str, list[tuple[bool, float]]] = {}
    for item, answer, steps in zip(scored, measured.answers_to(scored), measured.statistics_of(scored), strict=True):
        if answer is not None:
            kind = kinds.setdefault(item.sample.workload, [])
            kind.append((answer.judgement.correct, probability(steps.baseline_nll, item)))
    weak = {}
    for name, kind in sorted(kinds.items()):
        mean = fmean(chance for _, chance in kind)
        if not mean >= least:
            right = sum(correct for correct, _ in kind)
            weak[name] = f"{right} of {len(kind)} questions of {name} ({100 * mean:.2g} % probable in the mean)"
    if weak:
        these = "this kind of work" if len(weak) == 1 else "these kinds of work"
        said = f"FP16 itself answers {'; '.join(weak.values())}: {these} cannot be judged, and no candidate was run"
        raise CannotBeJudged(said, list(weak), sorted(kinds.keys() - weak))
