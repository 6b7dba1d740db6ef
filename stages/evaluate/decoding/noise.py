"""An engine beside itself: some samples again in another batch composition, whose distances are the noise of a comparison."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.core.engine import Engine
from pipeline.core.records import Progress
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.report import NoiseFloor
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.results import ResultFolder, SampleResult
from stages.evaluate.decoding.rows import Answer, run_samples
from stages.evaluate.decoding.stored import LOGPROBS
from stages.evaluate.distances import metrics
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.distances.scores import BaselineHeads
from stages.evaluate.inputs.checks import judge
from stages.evaluate.inputs.tokens import EncodedSample, Tokenizer


def first_of_each_workload(encoded: Sequence[EncodedSample], count: int) -> list[int]:
    """Return the indices of the first `count` samples of every workload."""
    counts: dict[str, int] = {}
    indices = []
    for i, item in enumerate(encoded):
        counts[item.sample.workload] = counts.get(item.sample.workload, 0) + 1
        if counts[item.sample.workload] <= count:
            indices.append(i)
    return indices


def labelled(progress: Progress, prefix: str) -> Progress:
    """Return a progress whose labels begin with a prefix."""
    return lambda label, done, total: progress(f"{prefix}{label}", done, total)


def greedy_of(tokenizer: Tokenizer, config: WorkloadsConfig) -> Greedy:
    """Return how answers end."""
    return Greedy(tokenizer.eos_token_id, config.extra_new_tokens)


def judged_answers(
    encoded: Sequence[EncodedSample], results: Sequence[SampleResult], tokenizer: Tokenizer
) -> list[Answer | None]:
    """Judge the answers; None for a sample that is not judged."""
    answers: list[Answer | None] = []
    for item, result in zip(encoded, results, strict=True):
        if result.answer is None:
            answers.append(None)
        else:
            text = tokenizer.text(result.answer)
            answers.append(Answer(text, judge(item.sample, text), result.answer))
    return answers


def repeated_samples(encoded: Sequence[EncodedSample], config: WorkloadsConfig) -> list[int]:
    """Return the indices of the samples that an engine repeats: the first and the longest ones of every workload."""
    if not config.noise_samples:
        return []
    longest: dict[str, int] = {}
    for i, item in enumerate(encoded):
        known = longest.setdefault(item.sample.workload, i)
        if len(item.prompt) + len(item.reference) > len(encoded[known].prompt) + len(encoded[known].reference):
            longest[item.sample.workload] = i
    return sorted({*first_of_each_workload(encoded, config.noise_samples), *longest.values()})


def candidate_noise(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    indices: Sequence[int],
    answers: Sequence[Answer | None],
    tokenizer: Tokenizer,
    config: WorkloadsConfig,
    progress: Progress,
) -> tuple[NoiseFloor, list[SampleResult]]:
    """Measure the candidate's noise as the baseline's: its distributions on the repeated samples are made for that."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, path = ResultFolder(Path(scratch) / "results"), Path(scratch) / LOGPROBS
        subset = [encoded[i] for i in indices]
        named = labelled(progress, "noise floor: ")
        first = run_samples(engine, subset, None, config.batch_size, named, greedy=None, folder=folder)
        BaselineHeads.write(path, ((item.sample.id, folder.heads(i)) for i, item in enumerate(subset)))
        noise, second = noise_floor(engine, encoded, indices, answers, BaselineHeads(path), tokenizer, config, progress)
    return noise, [*first, *second]


def noise_floor(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    indices: Sequence[int],
    answers: Sequence[Answer | None],
    heads: BaselineHeads,
    tokenizer: Tokenizer,
    config: WorkloadsConfig,
    progress: Progress,
) -> tuple[NoiseFloor, list[SampleResult]]:
    """Measure the A/A noise: compare an engine with itself on some samples in another batch composition.

    Sequences run one by one, or in pairs if they ran one by one before; batched and token by token where the engine ran them in
    one pass. Whole requests stay whole requests: each step of one would be a request of its own.
    """
    if not indices:
        return NoiseFloor(samples=0, fidelity=None, answer_flips=0), []
    subset = [encoded[i] for i in indices]
    in_requests = engine.can(Engine.forced_together)
    batched = engine.can(Engine.forced) and not in_requests
    results = run_samples(
        engine,
        subset,
        heads,
        config.batch_size if batched else 1 if config.batch_size > 1 else 2,
        labelled(progress, "noise floor: "),
        greedy=greedy_of(tokenizer, config),
        one_pass=in_requests,
    )
    repeated = zip(indices, judged_answers(subset, results, tokenizer), strict=True)
    flips = sum(a is not None and a.judgement != answers[i].judgement for i, a in repeated)  # type: ignore[union-attr]
    statistics = StepStatistics.joined([result.statistics for result in results])
    return NoiseFloor(samples=len(indices), fidelity=metrics.fidelity(statistics), answer_flips=flips), results
