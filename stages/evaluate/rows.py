"""Running samples through an engine and turning what it said into rows: one pass of forced decode, then the answers.

An answer whose forced decode chose every reference token greedily **is** the reference: greedy decoding would have fed
the same tokens to the same engine. Only the other answers are generated.
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
    """Forced decode of every sample against `baseline`, or, with `record`, into it. Statistics per sample.

    `after_prefill` and `one_pass` are those of `forced_decode`.
    """
    lengths = [len(item.reference) for item in encoded]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    everything = StepStatistics.empty(int(starts[-1]))
    done = 0
    for step in forced_decode(engine, encoded, batch_size, after_prefill, one_pass):
        logp = log_softmax(step.logits_BV)
        places = list(zip(step.samples, step.positions, strict=True))
        tensors = [(baseline.tensor(encoded[i].sample.id), position) for i, position in places]
        if record:
            for (tensor, position), row in zip(tensors, logp, strict=True):
                tensor[position] = row
        stored = np.stack([tensor[position] for tensor, position in tensors])
        tokens = [encoded[i].reference[position] for i, position in places]
        index = starts[step.samples] + np.array(step.positions)
        everything.put(index, compare(stored, logp, tokens))
        done += len(places)
        progress(done, int(starts[-1]))
    return [everything.part(a, b) for a, b in pairwise(starts.tolist())]


def answers(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    statistics: Sequence[StepStatistics],
    tokenizer: Tokenizer,
    config: WorkloadsConfig,
) -> list[Answer | None]:
    """The engine's greedy answer to every sample that is checked, None for the others."""
    texts: dict[int, str] = {}
    deviating: list[int] = []
    for i, (item, steps) in enumerate(zip(encoded, statistics, strict=True)):
        if not item.judged:
            continue
        if tuple(steps.greedy.tolist()) == item.reference:
            texts[i] = tokenizer.text(item.reference[:-1])
        else:
            deviating.append(i)
    chosen = [encoded[i] for i in deviating]
    limits = [len(item.reference) + config.extra_new_tokens for item in chosen]
    generated = greedy_decode(engine, chosen, config.batch_size, limits, tokenizer.eos_token_id)
    texts |= {i: tokenizer.text(ids) for i, ids in zip(deviating, generated, strict=True)}
    return [Answer(texts[i], judge(item.sample, texts[i])) if i in texts else None for i, item in enumerate(encoded)]


def _mean(values: Array) -> float | None:
    mean = float(values.mean())
    return mean if np.isfinite(mean) else None


def make_row(
    item: EncodedSample, steps: StepStatistics, tail_floor: float, before: Answer | None, after: Answer | None
) -> SampleRow:
    """The row of one sample; `tail_floor` is the pooled 99th percentile of the KL."""
    return SampleRow(
        id=item.sample.id,
        workload=item.sample.workload,
        document=item.sample.cluster,
        context_tokens=len(item.prompt),
        depth=item.sample.depth,
        scored_tokens=len(item.reference),
        judged=after is not None,
        baseline_correct=before.judgement.correct if before else None,
        candidate_correct=after.judgement.correct if after else None,
        baseline_valid=before.judgement.valid if before else None,
        candidate_valid=after.judgement.valid if after else None,
        reference=item.sample.reference if after else None,
        baseline_generation=before.text if before else None,
        candidate_generation=after.text if after else None,
        mean_kl=_mean(steps.kl),
        max_kl=_mean(steps.kl.max(keepdims=True)),
        kl_tail=sorted(steps.kl[steps.kl > tail_floor].tolist(), reverse=True),
        baseline_nll=_mean(steps.baseline_nll),
        candidate_nll=_mean(steps.candidate_nll),
        top1_agreement=_mean(steps.top1),
        top10_overlap=_mean(steps.top10),
        mean_squared_delta_p=_mean(steps.delta_p**2),
        non_finite_steps=int((~np.isfinite(steps.kl)).sum()),
    )


def make_rows(
    encoded: Sequence[EncodedSample],
    statistics: Sequence[StepStatistics],
    before: Sequence[Answer | None],
    after: Sequence[Answer | None],
) -> list[SampleRow]:
    """Rows of all samples, in order."""
    pooled = np.concatenate([steps.kl for steps in statistics])
    pooled = pooled[np.isfinite(pooled)]
    floor = float(np.percentile(pooled, 99)) if len(pooled) else 0.0
    return [make_row(item, steps, floor, b, a) for item, steps, b, a in zip(encoded, statistics, before, after, strict=True)]
