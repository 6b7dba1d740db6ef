"""Runs the samples of one round on an engine (baseline or candidate) and writes the measurements.

While a round runs, `unfinished/` in its directory holds the results of finished samples.
"""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
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
    repeated = {item.sample.id for item in repeated_samples(items, config)}
    run = partial(run_samples, engine, batch_size=config.batch_size, logprobs=logprobs)
    folder = ResultFolder(out / UNFINISHED)
    observe = None if comparison is None else comparison.take
    results = run(items, progress=label, stopping=stopping, folder=folder, repeated=repeated, observe=observe)
    answers = judge_answers(items, results, tokenizer, stopping)
    if baseline is None:
        items, results = score_own_answers(items, results, answers, stopping, run, label)
    scored = {item.sample.id: result for item, result in zip(items, results, strict=True)}
    write_logprobs(out / LOGPROBS, {name: result.logprobs for name, result in scored.items() if result.logprobs is not None})
    if config.speculation is not None:
        answers = count_drafts(answers, items, config.speculation, stopping, label, {} if known is None else known.answers)
    Round(
        policy=engine.policy.name,
        takes_effect=engine.policy.takes_effect,
        coverage=Exercised.merged([result.trace for result in results]),
        conformance=_conformance(engine, comparison, config, label),
        rounding=None if reference is None else reference.assumed_rounding,
        scale_changes=changes,
        right_answers={item.sample.id: list(item.reference) for item in items if item.replaced and known is None},
        answers=answers,
        statistics={name: result.statistics for name, result in scored.items()},
    ).write(out)
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


UNLIKELY = 0.1
"""Probability of a reference below which the baseline's own right answer may be scored instead."""


def judge_answers(
    items: Sequence[EncodedSample], results: Sequence[SampleResult], tokenizer: BundleTokenizer, stopping: StoppingCriteria
) -> dict[str, JudgedAnswer]:
    """Return the engine's answers to the judged samples, by sample id."""
    answers = {}
    for item, result in zip(items, results, strict=True):
        if result.answer is not None:
            text = tokenizer.text(stopping.without_stop(result.answer))
            answers[item.sample.id] = JudgedAnswer(text, judge(item.sample, text), result.answer)
    return answers


def score_own_answers(
    items: Sequence[EncodedSample],
    results: Sequence[SampleResult],
    answers: Mapping[str, JudgedAnswer],
    stopping: StoppingCriteria,
    run: Callable[..., list[SampleResult]],
    progress: Progress,
) -> tuple[list[EncodedSample], list[SampleResult]]:
    """Replace a sample's reference by the baseline's own right answer if that answer is likelier than the reference.

    Return the samples with the scored references, and their results. `run` is `run_samples` on the baseline.
    """
    scored, scores = list(items), list(results)
    candidates = {
        i: own
        for i, (item, result) in enumerate(zip(items, results, strict=True))
        if (own := with_own_answer(item, result, answers.get(item.sample.id), stopping)) is not None
    }
    rescored = run(list(candidates.values()), progress=prefix_labels(progress, "own answers: "))
    for (i, item), result in zip(candidates.items(), rescored, strict=True):
        if result.statistics.baseline_nll.sum() < scores[i].statistics.baseline_nll.sum():
            trace = Exercised.merged([scores[i].trace, result.trace])
            scored[i], scores[i] = item, replace(result, sample=i, answer=scores[i].answer, trace=trace)
    return scored, scores


def with_own_answer(
    item: EncodedSample, result: SampleResult, answer: JudgedAnswer | None, stopping: StoppingCriteria
) -> EncodedSample | None:
    """Return the sample with the baseline's own answer as its reference; None if it is wrong, or if the reference is likely.

    A sample with scored `results` keeps its reference, because the token ranges of the results are unknown in another answer.
    """
    if answer is None or not answer.correct or item.results or probability(result.statistics.baseline_nll, item) >= UNLIKELY:
        return None
    own_answer = stopping.with_stop(answer.tokens, item)
    return item.with_answer(own_answer) if tuple(own_answer) != item.reference else None


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
