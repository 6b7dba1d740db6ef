"""Which words of a right answer are scored: the reference's, or those that the baseline says it in."""

from collections.abc import Sequence

from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.results import SampleResult
from stages.evaluate.decoding.rows import Answer, probability
from stages.evaluate.inputs.tokens import EncodedSample

UNLIKELY = 0.1
"""A reference of less probability under a baseline that answers rightly is not how it says the answer."""


def in_own_words(
    encoded: Sequence[EncodedSample], results: Sequence[SampleResult], answers: Sequence[Answer | None], greedy: Greedy
) -> dict[int, EncodedSample]:
    """Return the samples whose reference the baseline finds unlikely, with its own right answer instead, by their place.

    Where results are scored, each given the steps before, an answer of its own would have no such results.

    Args:
        encoded: The samples in tokens.
        results: What came of the baseline.
        answers: Its answers, None where the sample is not judged.
        greedy: How answers end.
    """
    instead = {}
    for i, (item, result, answer) in enumerate(zip(encoded, results, answers, strict=True)):
        if answer is None or not answer.judgement.correct or item.results:
            continue
        if probability(result.statistics.baseline_nll, item) >= UNLIKELY:
            continue
        said = greedy.said(answer.tokens, item)
        if tuple(said) != item.reference:
            instead[i] = item.answered(said)
    return instead


def likelier(own: SampleResult, reference: SampleResult) -> bool:
    """Return whether the baseline finds its own words more likely than the reference."""
    return bool(own.statistics.baseline_nll.sum() < reference.statistics.baseline_nll.sum())
