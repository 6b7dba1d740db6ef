"""Report rows of samples, made from the statistics and the judged answers of both engines."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stages.core.records import finite
from stages.evaluate.distances.distance import Array, StepStatistics
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.report import Acceptance, SampleRow
from stages.verdict.thresholds import FAR_KL


@dataclass(frozen=True)
class JudgedAnswer:
    """A generated answer, and whether it is right."""

    text: str
    correct: bool
    tokens: tuple[int, ...] = ()
    """Tokens including the stop token; an answer that reached its limit has no stop token."""
    passes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Drafter -> (tokens of the answer including the stop token, target passes that produce them)."""


def _mean(values: Array) -> float | None:
    return finite(float(values.mean()))


def probability(nll: Array, item: EncodedSample) -> float:
    """Return the product of the reference tokens' probabilities, or its mean over the sample's scored `results`, if any."""
    parts = item.results or ((0, len(nll)),)
    return float(np.mean([np.exp(-nll[start:stop].sum()) for start, stop in parts]))


def _acceptance(baseline: JudgedAnswer, candidate: JudgedAnswer) -> dict[str, Acceptance]:
    return {
        name: Acceptance(
            baseline_tokens=baseline.passes[name][0],
            baseline_passes=baseline.passes[name][1],
            candidate_tokens=tokens,
            candidate_passes=passes,
        )
        for name, (tokens, passes) in candidate.passes.items()
        if name in baseline.passes
    }


def make_row(
    item: EncodedSample, steps: StepStatistics, baseline: JudgedAnswer | None, candidate: JudgedAnswer | None
) -> SampleRow:
    """Build the row of a sample. The answers are None if the sample is not judged, or if none were generated."""
    sample = item.sample
    return SampleRow(
        id=sample.id,
        workload=sample.workload,
        document=sample.cluster,
        context_tokens=len(item.prompt),
        depth=sample.depth,
        scored_tokens=len(item.reference),
        judged=candidate is not None,
        baseline_correct=baseline.correct if baseline else None,
        candidate_correct=candidate.correct if candidate else None,
        reference=sample.reference if candidate else None,
        baseline_generation=baseline.text if baseline else None,
        candidate_generation=candidate.text if candidate else None,
        mean_kl=_mean(steps.kl),
        max_kl=_mean(steps.kl.max(keepdims=True)),
        far_tokens=int((steps.kl > FAR_KL).sum()),
        baseline_nll=_mean(steps.baseline_nll),
        candidate_nll=_mean(steps.candidate_nll),
        top1_agreement=_mean(steps.top1),
        top10_overlap=_mean(steps.top10),
        non_finite_steps=int((~np.isfinite(steps.kl)).sum()),
        difficulty=sample.difficulty,
        round=item.round,
        acceptance=_acceptance(baseline, candidate) if baseline and candidate else {},
        baseline_probability=finite(probability(steps.baseline_nll, item)) if item.sample.judged else None,
        candidate_probability=finite(probability(steps.candidate_nll, item)) if item.sample.judged else None,
        right_answer="baseline" if item.replaced else "reference",
    )
