"""Runs the samples of one round on an engine (baseline or candidate) and writes the measurements.

While a round runs, `unfinished/` in its directory holds the results of finished samples.
"""

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from stages.core.errors import GateRefusal
from stages.core.records import Progress
from stages.engines.interface import Engine, SupportsDelivery
from stages.evaluate.conformance.comparer import Comparer
from stages.evaluate.conformance.comparison import Comparison, spread
from stages.evaluate.conformance.engine import ReferenceEngine
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.results import ResultFolder, SampleResult
from stages.evaluate.decoding.rows import Answer, labelled, probability, run_samples
from stages.evaluate.decoding.speculation import count_drafts
from stages.evaluate.decoding.stored import LOGPROBS, Round, read_round
from stages.evaluate.distances.distance import stored_logprobs, write_logprobs
from stages.evaluate.inputs.checks import judge
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, repeated_samples
from stages.policies.delivery import ScaleChange, ScaleChangeKind, describe_changes, scale_changes
from stages.verdict.conformance import EngineConformance
from stages.verdict.coverage import Exercised
from stages.workloads.config import WorkloadsConfig

UNFINISHED = "unfinished"


@dataclass
class ScoredSample:
    """A sample with the reference that was scored, and its result."""

    encoded: EncodedSample
    result: SampleResult
    folder: ResultFolder
    """Holds the log-probabilities of the result."""
    answer: Answer | None = None
    """The engine's answer; None if the sample is not judged."""

    @property
    def name(self) -> str:
        return self.encoded.sample.id

    def read_answer(self, tokenizer: BundleTokenizer, greedy: Greedy) -> None:
        """Decode and judge the generated answer, if the sample has one."""
        tokens = self.result.answer
        if tokens is not None:
            text = tokenizer.text(greedy.without_stop(tokens))
            self.answer = Answer(text, judge(self.encoded.sample, text), tokens)


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

    The function stores the baseline's log-probabilities for all samples, and the candidate's for samples that it repeats later
    (`tokens.repeated_samples`). If the baseline's own answer is right and likelier than the reference, this answer is scored
    instead of the reference, on both engines.

    Args:
        out: Output directory. It must be empty, or left by an interrupted call with the same arguments. It receives the files
            that `stored.read_round` and `distance.stored_logprobs` read.
        baseline: Directory that this function wrote for the baseline in the same round; None for the baseline itself.

    Raises:
        UserError: The baseline's logits are not finite.
        GateRefusal: The engine's scales differ from its checkpoint's scales in a way that is not in `allow_scale_changes`.
    """
    changes = audit_scales(engine, allow_scale_changes)
    greedy = Greedy(tokenizer.stop_tokens(config), config.extra_new_tokens)
    known = None if baseline is None else read_round(baseline)
    items = encoded if known is None else known.scored(encoded)
    label = labelled(progress, "baseline: ") if baseline is None else progress
    logprobs = None if baseline is None else stored_logprobs(baseline / LOGPROBS)
    comparison = None if reference is None else _comparison(engine, reference, known, items, config, label)
    folder = ResultFolder(out / UNFINISHED / "references")
    repeated = {item.sample.id for item in repeated_samples(items, config)}
    run = partial(run_samples, engine, batch_size=config.batch_size, logprobs=logprobs)
    observe = None if comparison is None else comparison.take
    results = run(items, progress=label, greedy=greedy, folder=folder, repeated=repeated, observe=observe)
    samples = [ScoredSample(item, result, folder) for item, result in zip(items, results, strict=True)]
    for sample in samples:
        sample.read_answer(tokenizer, greedy)
    if baseline is None:
        run_again = partial(run, progress=labelled(label, "own answers: "))
        score_own_answers(samples, greedy, out / UNFINISHED / "own", run_again)
    recorded = (sample for sample in samples if logprobs is None or sample.name in repeated)
    write_logprobs(out / LOGPROBS, ((sample.name, sample.folder.logprobs(sample.result.sample)) for sample in recorded))
    answers, scored = [sample.answer for sample in samples], [sample.encoded for sample in samples]
    others = () if known is None else [known.answers.get(sample.name) for sample in samples]
    answers = count_drafts(answers, scored, config.speculation, greedy, label, others)
    Round(
        policy=engine.policy.name,
        takes_effect=engine.policy.takes_effect,
        coverage=Exercised.merged([sample.result.trace for sample in samples]),
        conformance=_conformance(engine, comparison, config, label),
        rounding=None if reference is None else reference.assumed_rounding,
        scale_changes=changes,
        right_answers={item.sample.id: list(item.reference) for item in scored if item.replaced and logprobs is None},
        answers={sample.name: answer for sample, answer in zip(samples, answers, strict=True) if answer is not None},
        statistics={sample.name: sample.result.statistics for sample in samples},
    ).write(out)
    shutil.rmtree(out / UNFINISHED)


def _comparison(
    engine: Engine,
    reference: ReferenceEngine,
    known: Round | None,
    items: Sequence[EncodedSample],
    config: WorkloadsConfig,
    progress: Progress,
) -> Comparison:
    """Start the comparison. `known`: the baseline's round, which determines a candidate's allowed distance."""
    comparer = Comparer(engine, reference.with_limits_of(None if known is None else known.conformance))
    return Comparison(comparer, items, spread(items, config.conformance_samples), config.batch_size, progress)


def _conformance(
    engine: Engine, comparison: Comparison | None, config: WorkloadsConfig, progress: Progress
) -> EngineConformance | None:
    """Return the result of the comparison. Without one, the quick check has an empty list, which no gate passes."""
    if comparison is None:
        return EngineConformance(policy=engine.policy.name, requests=[]) if config.is_quick_check else None
    comparison.decode_missing()  # requests that had finished before an interruption
    progress("conformance", 0, 1)
    return comparison.result()


UNLIKELY = 0.1
"""Probability below which a reference counts as a phrasing that the baseline would not use for the answer."""


def score_own_answers(
    samples: Sequence[ScoredSample], greedy: Greedy, unfinished: Path, run: Callable[..., list[SampleResult]]
) -> None:
    """Score the baseline's own right answers where the reference is unlikely. A likelier own answer replaces the reference.

    `run` is `run_samples` on the baseline, and `unfinished` the directory of its results.
    """
    changed = [(sample, own) for sample in samples if (own := in_own_words(sample, greedy)) is not None]
    if not changed:
        return
    answered = [own for _, own in changed]
    folder = ResultFolder(unfinished)
    results = run(answered, folder=folder)
    for (sample, own), result in zip(changed, results, strict=True):
        if result.statistics.baseline_nll.sum() < sample.result.statistics.baseline_nll.sum():
            trace = Exercised.merged([sample.result.trace, result.trace])
            sample.result = replace(result, answer=sample.result.answer, trace=trace)
            sample.encoded = own
            sample.folder = folder


def in_own_words(sample: ScoredSample, greedy: Greedy) -> EncodedSample | None:
    """Return a sample with the baseline's right answer as its reference; None if its reference was likely enough.

    A sample with scored `results` keeps its reference, because the baseline's answer has no such token ranges.
    """
    encoded, answer = sample.encoded, sample.answer
    if answer is None or not answer.correct or encoded.results:
        return None
    if probability(sample.result.statistics.baseline_nll, encoded) >= UNLIKELY:
        return None
    own_answer = greedy.with_stop(answer.tokens, encoded)
    return encoded.answered(own_answer) if tuple(own_answer) != encoded.reference else None


def audit_scales(engine: Engine, allowed: Collection[ScaleChangeKind]) -> list[ScaleChange] | None:
    """Return the scales that differ between an engine and its checkpoint; None if the engine does not load scales by itself.

    Raises GateRefusal if some of the changes are not allowed.
    """
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
            f"kv={policy.name}: the engine does not use the scales of its checkpoint: {describe_changes(refused)}; deliver "
            f"them as it reads them, or judge it as it is with gates.allow_scale_changes=[{kinds}]"
        )
    return changes
