"""Runs samples on an engine (forced decode and answers) and converts the results to report rows."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stages.core.errors import UserError
from stages.core.records import Progress, finite, no_progress
from stages.engines.interface import Engine
from stages.evaluate.decoding.batches import DecodeStep, StoppingCriteria
from stages.evaluate.decoding.decode import decode
from stages.evaluate.decoding.results import ResultFolder, SampleResult
from stages.evaluate.distances.distance import (
    Array,
    Distributions,
    LogProbs,
    LogProbsReader,
    SampleLogProbs,
    StepStatistics,
    compare_logprobs,
    truncate_row,
)
from stages.evaluate.inputs.checks import well_formed
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.report import Acceptance, SampleRow
from stages.verdict.thresholds import FAR_KL

BASELINE_NOT_FINITE = "backend.compute_dtype: use float32, the baseline's logits are not finite"


@dataclass(frozen=True)
class JudgedAnswer:
    """A generated answer, and whether it is right."""

    text: str
    correct: bool
    tokens: tuple[int, ...] = ()
    """Tokens including the stop token; an answer that reached its limit has no stop token."""
    passes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Drafter -> (tokens of the answer including the stop token, target passes that produce them)."""


def prefix_labels(progress: Progress, prefix: str) -> Progress:
    """Return a progress callback that prepends a prefix to its labels."""
    return lambda label, done, total: progress(f"{prefix}{label}", done, total)


@dataclass
class _Scores:
    """The scores of a sample that is being decoded."""

    baseline: SampleLogProbs | None
    """The baseline's log-probabilities; None for the baseline, which is compared with its own."""
    recorded: list[LogProbs] | None
    """The engine's own log-probabilities, if they are recorded."""
    tokens: list[tuple[float, ...]] = field(default_factory=list)
    """Statistics by token of the reference."""

    def add(self, token: int, distributions: Distributions, row: int, greedy: int) -> None:
        """Compare the row that predicts the next reference token with the baseline's. `greedy`: the row's most likely token."""
        logprobs = None if self.recorded is None else truncate_row(distributions, row, token)
        if self.recorded is not None and logprobs is not None:
            self.recorded.append(logprobs)
        stored = logprobs if self.baseline is None else self.baseline.at(len(self.tokens))
        assert stored is not None, "a baseline records its log-probabilities"
        self.tokens.append(compare_logprobs(stored, distributions, row, token, greedy))


def run_samples(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    batch_size: int,
    logprobs: LogProbsReader | None,
    *,
    progress: Progress = no_progress,
    stopping: StoppingCriteria | None = None,
    folder: ResultFolder | None = None,
    repeated: Collection[str] = (),
    after_prefill: Callable[[], None] | None = None,
    one_pass: bool = True,
    observe: Callable[[DecodeStep], None] | None = None,
) -> list[SampleResult]:
    """Run forced decode on every sample, compare its distributions with the baseline's, and generate the answers.

    See `decode` for `stopping`, `after_prefill` and `one_pass`. Raises UserError if a logit of the baseline is not finite.

    Args:
        logprobs: The baseline's log-probabilities; None if the engine is the baseline, whose own are recorded.
        folder: Receives each result as the sample finishes. Samples whose results it already holds are not run.
        repeated: Ids of samples for which a candidate's own log-probabilities are recorded too.
        observe: Called with every step, while its sequences are live.
    """
    results = {} if folder is None else folder.load()
    missing = [i for i in range(len(encoded)) if i not in results]
    counts = [len(item.reference) for item in encoded]
    decoded, total = sum(counts[i] for i in results), sum(counts)
    scores: dict[int, _Scores] = {}
    if missing:
        progress("forced decode [tokens]", decoded, total)
    for event in decode(engine, encoded, batch_size, stopping, chosen=missing, after_prefill=after_prefill, one_pass=one_pass):
        if isinstance(event, DecodeStep):
            distributions = Distributions(event.logits_BV)
            for row, (i, position) in enumerate(zip(event.samples, event.positions, strict=True)):
                if i not in scores:
                    name = encoded[i].sample.id
                    scores[i] = _Scores(logprobs and logprobs(name), [] if logprobs is None or name in repeated else None)
                scores[i].add(encoded[i].reference[position], distributions, row, event.greedy[row])
            if observe is not None:
                observe(event)
            decoded += len(event.samples)
        else:
            scored = scores.pop(event.sample)
            statistics = StepStatistics(*np.array(scored.tokens).T)
            if logprobs is None and not np.isfinite(statistics.baseline_nll).all():
                raise UserError(f"{BASELINE_NOT_FINITE} on sample {encoded[event.sample].sample.id}")
            results[event.sample] = replace(event, statistics=statistics)
            if folder is not None:
                folder.save(
                    results[event.sample], None if scored.recorded is None else SampleLogProbs.concatenate(scored.recorded)
                )
        if decoded < total:
            progress("forced decode [tokens]", decoded, total)
        else:
            progress("answers [samples]", len(results), len(encoded))
    return [results[i] for i in range(len(encoded))]


def _mean(values: Array) -> float | None:
    return finite(float(values.mean()))


def probability(nll: Array, item: EncodedSample) -> float:
    """Return the probability of the right answer: the product over its tokens, or the mean of this product over its results."""
    parts = item.results or ((0, len(nll)),)
    return float(np.mean([np.exp(-nll[start:stop].sum()) for start, stop in parts]))


def _acceptance(baseline: JudgedAnswer, candidate: JudgedAnswer) -> dict[str, Acceptance]:
    """Return the acceptance by drafter, for drafters that both engines used."""
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
    """Build the row of a sample from the engines' answers, which are None if the sample is not judged."""
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
        baseline_valid=well_formed(sample, baseline.text) if baseline else None,
        candidate_valid=well_formed(sample, candidate.text) if candidate else None,
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
        mean_squared_delta_p=_mean(steps.delta_p**2),
        non_finite_steps=int((~np.isfinite(steps.kl)).sum()),
        difficulty=sample.difficulty,
        round=item.round,
        acceptance=_acceptance(baseline, candidate) if baseline and candidate else {},
        baseline_probability=finite(probability(steps.baseline_nll, item)) if item.sample.judged else None,
        candidate_probability=finite(probability(steps.candidate_nll, item)) if item.sample.judged else None,
        right_answer="baseline" if item.replaced else "reference",
    )
