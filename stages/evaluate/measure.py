"""Runs the samples of one round on an engine (baseline or candidate) and writes the measurements.

While a round runs, `unfinished/` in its directory holds the results of finished samples.
"""

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from stages.core.errors import GateRefusal, UserError
from stages.core.records import Progress, no_progress
from stages.engines.interface import Engine, SupportsDelivery
from stages.evaluate.conformance.comparer import ReferenceEngine, SequenceComparer
from stages.evaluate.conformance.comparison import ForcedDecodeComparison, spread
from stages.evaluate.decoding.decode import DecodeStep, StoppingCriteria, decode
from stages.evaluate.decoding.speculation import count_drafts
from stages.evaluate.decoding.stored import LOGPROBS, JudgedAnswer, ResultFolder, Round, SampleResult, probability, read_round
from stages.evaluate.distances.distance import (
    Distributions,
    LogProbs,
    LogProbsReader,
    SampleLogProbs,
    TokenStatistics,
    collect_statistics,
    compare_logprobs,
    stored_logprobs,
    truncate_row,
    write_logprobs,
)
from stages.evaluate.inputs.checks import judge
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, repeated_samples
from stages.policies.scales import ScaleChange, ScaleChangeKind, describe_changes, scale_changes
from stages.verdict.conformance import EngineConformance
from stages.verdict.coverage import Exercised
from stages.workloads.config import WorkloadsConfig

UNFINISHED = "unfinished"
BASELINE_NOT_FINITE = "backend.compute_dtype: use float32, the baseline's logits are not finite"


@dataclass
class ScoredSample:
    """A sample with the reference that was scored, and its result."""

    encoded: EncodedSample
    result: SampleResult
    answer: JudgedAnswer | None = None
    """The engine's answer; None if the sample is not judged."""

    @property
    def name(self) -> str:
        return self.encoded.sample.id

    def read_answer(self, tokenizer: BundleTokenizer, stopping: StoppingCriteria) -> None:
        tokens = self.result.answer
        if tokens is not None:
            text = tokenizer.text(stopping.without_stop(tokens))
            self.answer = JudgedAnswer(text, judge(self.encoded.sample, text), tokens)


def measure(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    tokenizer: BundleTokenizer,
    out: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress,
    baseline: Path | None = None,
    reference: ReferenceEngine | None = None,
    allow_scale_changes: Collection[ScaleChangeKind] = (),
) -> None:
    """Run the samples of a round on an engine; compare a candidate with the baseline.

    Stores log-probabilities of the baseline for all samples, and of a candidate for samples that it repeats later
    (`tokens.repeated_samples`). If the baseline's own answer is right and likelier than the reference, this answer is scored
    instead of the reference, on both engines.

    Raises UserError if the baseline's logits are not finite, GateRefusal if a change of scales is not in `allow_scale_changes`.

    Args:
        out: Output directory. It must be empty, or left by an interrupted call with the same arguments. It receives the files
            that `stored.read_round` and `distance.stored_logprobs` read.
        baseline: Directory that this function wrote for the baseline in the same round; None for the baseline itself.
    """
    changes = audit_scales(engine, allow_scale_changes)
    stopping = StoppingCriteria(tokenizer.stop_tokens(config), config.extra_new_tokens)
    known = None if baseline is None else read_round(baseline)
    items = encoded if known is None else known.scored(encoded)
    label = prefix_labels(progress, "baseline: ") if baseline is None else progress
    logprobs = None if baseline is None else stored_logprobs(baseline / LOGPROBS)
    comparison = None
    if reference is not None:  # a candidate's allowed distance depends on the baseline's
        comparer = SequenceComparer(engine, reference.with_limits_of(None if known is None else known.conformance))
        chosen = set(spread(items, config.conformance_samples))
        comparison = ForcedDecodeComparison(comparer, items, chosen, config.batch_size, label)
    folder = ResultFolder(out / UNFINISHED)
    repeated = {item.sample.id for item in repeated_samples(items, config)}
    run = partial(run_samples, engine, batch_size=config.batch_size, logprobs=logprobs)
    observe = None if comparison is None else comparison.take
    results = run(items, progress=label, stopping=stopping, folder=folder, repeated=repeated, observe=observe)
    samples = [ScoredSample(item, result) for item, result in zip(items, results, strict=True)]
    for sample in samples:
        sample.read_answer(tokenizer, stopping)
    if baseline is None:
        score_own_answers(samples, stopping, partial(run, progress=prefix_labels(label, "own answers: ")))
    recorded = [(sample.name, sample.result.logprobs) for sample in samples if sample.result.logprobs is not None]
    write_logprobs(out / LOGPROBS, recorded)
    result = _result(engine, samples, known, config, stopping, label)
    result.conformance = _conformance(engine, comparison, config, label)
    result.rounding = None if reference is None else reference.assumed_rounding
    result.scale_changes = changes
    result.write(out)
    shutil.rmtree(out / UNFINISHED)


def prefix_labels(progress: Progress, prefix: str) -> Progress:
    return lambda label, done, total: progress(f"{prefix}{label}", done, total)


@dataclass
class _Scores:
    baseline: SampleLogProbs | None
    """Log-probabilities to compare with: the baseline's, or in a repetition the engine's own earlier ones. None for the
    baseline's first run, which is compared with itself."""
    recorded: list[LogProbs] | None
    """The engine's own log-probabilities, if they are recorded."""
    tokens: list[TokenStatistics] = field(default_factory=list)

    def add(self, token: int, distributions: Distributions, row: int, greedy: int) -> None:
        """Compare the row that predicts the next reference token with the baseline's. `greedy`: the row's most likely token."""
        if self.recorded is not None:
            self.recorded.append(truncate_row(distributions, row, token))
        if self.baseline is not None:
            stored = self.baseline.at(len(self.tokens))
        else:
            assert self.recorded is not None, "a baseline records its log-probabilities"
            stored = self.recorded[-1]
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
        logprobs: Log-probabilities to compare with: the baseline's, or the engine's own of an earlier run. None records the
            log-probabilities of the engine, which is the baseline, and compares it with itself.
        folder: Receives each result as the sample finishes. Samples whose results it already holds are not run.
        repeated: Ids of samples for which a candidate's own log-probabilities are recorded too.
        observe: Called with every step, while its sequences are live.
    """
    results = {} if folder is None else folder.load()
    missing = [i for i in range(len(encoded)) if i not in results]
    counts = [len(item.reference) for item in encoded]
    decoded = sum(counts[i] for i in results)
    total = sum(counts)
    scores: dict[int, _Scores] = {}
    if missing:
        progress("forced decode [tokens]", decoded, total)
    for event in decode(engine, encoded, batch_size, stopping, chosen=missing, after_prefill=after_prefill, one_pass=one_pass):
        if isinstance(event, DecodeStep):
            distributions = Distributions(event.logits_BV)
            for row, token in enumerate(event.tokens):
                item = encoded[token.sample]
                if token.sample not in scores:
                    recorded: list[LogProbs] | None = [] if logprobs is None or item.sample.id in repeated else None
                    scores[token.sample] = _Scores(logprobs and logprobs(item.sample.id), recorded)
                scores[token.sample].add(item.reference[token.position], distributions, row, token.greedy)
            if observe is not None:
                observe(event)
            decoded += len(event.tokens)
        else:
            scored = scores.pop(event.sample)
            statistics = collect_statistics(scored.tokens)
            if logprobs is None and not np.isfinite(statistics.baseline_nll).all():
                raise UserError(f"{BASELINE_NOT_FINITE} on sample {encoded[event.sample].sample.id}")
            own = None if scored.recorded is None else SampleLogProbs.concatenate(scored.recorded)
            results[event.sample] = replace(event, statistics=statistics, logprobs=own)
            if folder is not None:
                folder.save(results[event.sample])
        if decoded < total:
            progress("forced decode [tokens]", decoded, total)
        else:
            progress("answers [samples]", len(results), len(encoded))
    return [results[i] for i in range(len(encoded))]


def _conformance(
    engine: Engine, comparison: ForcedDecodeComparison | None, config: WorkloadsConfig, progress: Progress
) -> EngineConformance | None:
    """Return the comparison's result; without one, None or, in a quick check, a result without requests, which cannot pass."""
    if comparison is None:
        return EngineConformance(policy=engine.policy.name, requests=[]) if config.is_quick_check else None
    comparison.decode_missing()  # requests whose results an interrupted call had saved
    progress("conformance", 0, 1)
    return comparison.result()


def _result(
    engine: Engine,
    samples: Sequence[ScoredSample],
    known: Round | None,
    config: WorkloadsConfig,
    stopping: StoppingCriteria,
    progress: Progress,
) -> Round:
    """Return the measurements of the samples; the caller adds conformance, rounding and scale changes.

    `known`: the baseline's round; None for the baseline itself.
    """
    scored = [sample.encoded for sample in samples]
    others = () if known is None else [known.answers.get(sample.name) for sample in samples]
    answers = count_drafts([sample.answer for sample in samples], scored, config.speculation, stopping, progress, others)
    return Round(
        policy=engine.policy.name,
        takes_effect=engine.policy.takes_effect,
        coverage=Exercised.merged([sample.result.trace for sample in samples]),
        right_answers={item.sample.id: list(item.reference) for item in scored if item.replaced and known is None},
        answers={sample.name: answer for sample, answer in zip(samples, answers, strict=True) if answer is not None},
        statistics={sample.name: sample.result.statistics for sample in samples},
    )


UNLIKELY = 0.1
"""Probability of a reference below which the baseline's own right answer may be scored instead."""


def score_own_answers(
    samples: Sequence[ScoredSample], stopping: StoppingCriteria, run: Callable[..., list[SampleResult]]
) -> None:
    """Replace a sample's reference by the baseline's own right answer if that answer is likelier than the reference.

    `run` is `run_samples` on the baseline.
    """
    pairs = [(sample, item) for sample in samples if (item := with_own_answer(sample, stopping)) is not None]
    if not pairs:
        return
    for (sample, item), result in zip(pairs, run([item for _, item in pairs]), strict=True):
        if result.statistics.baseline_nll.sum() < sample.result.statistics.baseline_nll.sum():
            trace = Exercised.merged([sample.result.trace, result.trace])
            sample.result = replace(result, answer=sample.result.answer, trace=trace)
            sample.encoded = item


def with_own_answer(sample: ScoredSample, stopping: StoppingCriteria) -> EncodedSample | None:
    """Return the sample with the baseline's own answer as its reference; None if it is wrong, or if the reference is likely.

    A sample with scored `results` keeps its reference, because the token ranges of the results are unknown in another answer.
    """
    encoded = sample.encoded
    answer = sample.answer
    if answer is None or not answer.correct or encoded.results:
        return None
    if probability(sample.result.statistics.baseline_nll, encoded) >= UNLIKELY:
        return None
    own_answer = stopping.with_stop(answer.tokens, encoded)
    return encoded.with_answer(own_answer) if tuple(own_answer) != encoded.reference else None


def audit_scales(engine: Engine, allowed: Collection[ScaleChangeKind]) -> list[ScaleChange] | None:
    """Return the scales that the engine changed; None if it loads none. Raises GateRefusal if a change is not allowed."""
    if not isinstance(engine, SupportsDelivery):
        return None
    policy = engine.policy
    static = {
        layer: [side for side, form in policy.sides(layer).items() if form.has_static_scales]
        for layer in range(engine.shape.layers)
    }
    changes = scale_changes(engine.delivery(), static)
    refused = [change for change in changes if change.kind not in allowed]
    if refused:
        kinds = ",".join(sorted({change.kind for change in changes}))
        raise GateRefusal(
            f"kv={policy.name}: the engine does not use the scales of its checkpoint: {describe_changes(refused)}; write "
            f"them in the form that the engine reads, or accept the change with gates.allow_scale_changes=[{kinds}]"
        )
    return changes
