"""Runs samples through an engine, forced decode first and answers second, and writes the results into rows.

Where forced decode found every reference token most likely, the greedy answer **is** the reference, because greedy decode
would have fed the same tokens to the same engine. Only the other answers are generated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeline.core.records import Engine
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.report import SampleRow
from stages.evaluate.checks import Judgement, judge
from stages.evaluate.decode import forced_decode, greedy_decode
from stages.evaluate.distance import Array, StepStatistics, compare, log_softmax
from stages.evaluate.scores import LogProbabilities
from stages.evaluate.tokens import EncodedSample, Tokenizer


@dataclass(frozen=True)
class Answer:
    """A generated text and its judgement."""

    text: str
    judgement: Judgement


def score(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    baseline: LogProbabilities,
    batch_size: int,
    progress: Callable[[int, int], None],
    *,
    record: bool = False,
    after_prefill: Callable[[], None] | None = None,
    one_pass: bool = True,
) -> list[StepStatistics]:
    """Run forced decode on every sample and compare its log-probabilities with the baseline's.

    Args:
        engine: The engine to drive.
        encoded: The samples in tokens.
        baseline: The baseline's log-probabilities of these samples.
        batch_size: Most sequences in one decode step.
        progress: Called with the tokens scored so far and the tokens in all.
        record: Whether the log-probabilities are first written into `baseline`, which is how a baseline is made.
        after_prefill: See `forced_decode`.
        one_pass: See `forced_decode`.

    Returns:
        The statistics of each sample's reference tokens.
    """
    lengths = [len(item.reference) for item in encoded]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    statistics = StepStatistics.empty(int(starts[-1]))
    done = 0
    for step in forced_decode(engine, encoded, batch_size, after_prefill, one_pass):
        logp = log_softmax(step.logits_BV)
        predictions = list(zip(step.samples, step.positions, strict=True))
        tensors = [(baseline.tensor(encoded[i].sample.id), position) for i, position in predictions]
        if record:
            for (tensor, position), row in zip(tensors, logp, strict=True):
                tensor[position] = row
        stored = np.stack([tensor[position] for tensor, position in tensors])
        tokens = [encoded[i].reference[position] for i, position in predictions]
        index = starts[step.samples] + np.array(step.positions)
        statistics.put(index, compare(stored, logp, tokens))
        done += len(predictions)
        progress(done, int(starts[-1]))
    return [statistics.part(start, stop) for start, stop in pairwise(starts.tolist())]


def answers(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    statistics: Sequence[StepStatistics],
    tokenizer: Tokenizer,
    config: WorkloadsConfig,
) -> list[Answer | None]:
    """Return the engine's greedy answer to every judged sample, None for the others.

    Args:
        engine: The engine to drive.
        encoded: The samples in tokens.
        statistics: What `score` returned for these samples on this engine.
        tokenizer: Turns token ids into text.
        config: Batch size, and how many tokens an answer may be longer than the reference.
    """
    texts: dict[int, str] = {}
    deviating: list[int] = []
    for i, (item, steps) in enumerate(zip(encoded, statistics, strict=True)):
        if not item.judged:
            continue
        if tuple(steps.greedy.tolist()) == item.reference:
            texts[i] = tokenizer.text(item.reference[:-1])
        else:
            deviating.append(i)
    subset = [encoded[i] for i in deviating]
    limits = [len(item.reference) + config.extra_new_tokens for item in subset]
    generated = greedy_decode(engine, subset, config.batch_size, limits, tokenizer.eos_token_id)
    texts |= {i: tokenizer.text(ids) for i, ids in zip(deviating, generated, strict=True)}
    return [Answer(texts[i], judge(item.sample, texts[i])) if i in texts else None for i, item in enumerate(encoded)]


def _mean(values: Array) -> float | None:
    mean = float(values.mean())
    return mean if np.isfinite(mean) else None


def make_row(
    item: EncodedSample, steps: StepStatistics, tail_floor: float, baseline: Answer | None, candidate: Answer | None
) -> SampleRow:
    """Build the row of one sample.

    Args:
        item: The sample in tokens.
        steps: The statistics of its reference tokens.
        tail_floor: The row lists the KL of every step above this value, the pooled 99th percentile (nats).
        baseline: The baseline's answer, None where the sample is not judged.
        candidate: The candidate's answer, None where the sample is not judged.
    """
    return SampleRow(
        id=item.sample.id,
        workload=item.sample.workload,
        document=item.sample.cluster,
        context_tokens=len(item.prompt),
        depth=item.sample.depth,
        scored_tokens=len(item.reference),
        judged=candidate is not None,
        baseline_correct=baseline.judgement.correct if baseline else None,
        candidate_correct=candidate.judgement.correct if candidate else None,
        baseline_valid=baseline.judgement.valid if baseline else None,
        candidate_valid=candidate.judgement.valid if candidate else None,
        reference=item.sample.reference if candidate else None,
        baseline_generation=baseline.text if baseline else None,
        candidate_generation=candidate.text if candidate else None,
        mean_kl=_mean(steps.kl),
        max_kl=_mean(steps.kl.max(keepdims=True)),
        kl_tail=sorted(steps.kl[steps.kl > tail_floor].tolist(), reverse=True),
        baseline_nll=_mean(steps.baseline_nll),
        candidate_nll=_mean(steps.candidate_nll),
        top1_agreement=_mean(steps.top1),
        top10_overlap=_mean(steps.top10),
        mean_squared_delta_p=_mean(steps.delta_p**2),
        non_finite_steps=int((~np.isfinite(steps.kl)).sum()),
        difficulty=item.sample.difficulty,
    )


def make_rows(
    encoded: Sequence[EncodedSample],
    statistics: Sequence[StepStatistics],
    baseline: Sequence[Answer | None],
    candidate: Sequence[Answer | None],
) -> list[SampleRow]:
    """Build the rows of all samples, in order, from their statistics and both engines' answers."""
    pooled = np.concatenate([steps.kl for steps in statistics])
    pooled = pooled[np.isfinite(pooled)]
    tail_floor = float(np.percentile(pooled, 99)) if len(pooled) else 0.0
    columns = zip(encoded, statistics, baseline, candidate, strict=True)
    return [make_row(item, steps, tail_floor, before, after) for item, steps, before, after in columns]
