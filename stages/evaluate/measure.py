"""Runs the samples of one round on an engine (baseline or candidate) and writes the measurements.

While a round runs, `unfinished/` in its directory holds the results of finished samples.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from stages.core.errors import GateRefusal, UserError
from stages.core.records import Progress
from stages.engines.interface import Engine, SupportsDelivery
from stages.evaluate.conformance.comparer import Comparer
from stages.evaluate.conformance.comparison import Comparison, spread
from stages.evaluate.conformance.engine import ReferenceEngine
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.noise import repeated_samples
from stages.evaluate.decoding.results import SampleResult, unfinished
from stages.evaluate.decoding.rows import Answer, greedy_of, judged_answers, labelled, probability, run_samples
from stages.evaluate.decoding.speculation import speculated
from stages.evaluate.decoding.stored import LOGPROBS, Round, read_round
from stages.evaluate.distances.scores import stored_heads, write_heads
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, workloads_digest
from stages.verdict.conformance import EngineConformance
from stages.verdict.coverage import Exercised
from stages.verdict.delivery import ScaleChange, describe_changes, scale_changes
from stages.verdict.thresholds import ScaleChangeKind
from stages.workloads.config import WorkloadsConfig


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

    The function stores the baseline's heads for all samples, and the candidate's heads for samples that it repeats later
    (`noise.repeated_samples`). If the baseline's own answer is right and likelier than the reference, this answer is scored
    instead of the reference, on both engines.

    Args:
        engine: The engine.
        encoded: The samples of the round.
        tokenizer: The tokenizer of the engine bundle.
        out: Output directory. It must be empty, or left by an interrupted call with the same arguments. It receives the files
            that `stored.read_round` and `scores.stored_heads` read.
        config: Configuration with batch size, limits, and the number of samples to compare with the reference engine.
        progress: Called with a label, the number of tokens done, and the total.
        baseline: Directory that this function wrote for the baseline in the same round; None for the baseline itself.
        reference: The reference engine; None skips this comparison.
        allow_scale_changes: Allowed differences between the engine's scales and its checkpoint's scales.

    Raises:
        UserError: The baseline's logits are not finite, or the baseline had different samples or a different vocabulary.
        GateRefusal: The engine's scales differ from its checkpoint's scales in a way that is not allowed.
    """
    changes = audit_scales(engine, allow_scale_changes)
    digest, greedy = workloads_digest(encoded), greedy_of(tokenizer, config)
    known = None if baseline is None else read_round(baseline)
    if known is not None and (known.samples_digest, known.vocab_size) != (digest, engine.vocab_size):
        raise UserError(
            f"workloads: {baseline} was measured on other samples or another vocabulary than the candidate's; delete that "
            "directory, so that the baseline is measured again"
        )
    items = list(encoded) if known is None else known.scored(encoded)
    label = labelled(progress, "baseline: ") if baseline is None else progress
    heads = None if baseline is None else stored_heads(baseline / LOGPROBS)
    comparison = None
    if reference is not None:  # the baseline determines the allowed distance of a candidate from its reference engine
        comparer = Comparer(engine, reference.allowing(None if known is None else known.conformance))
        chosen = spread(items, config.conformance_samples)
        comparison = Comparison(comparer, tuple(items), chosen, config.batch_size, label)

    with unfinished(out, workloads_digest(items)) as folder:
        repeated = {item.sample.id for item in repeated_samples(items, config)}
        run = partial(run_samples, engine, batch_size=config.batch_size, heads=heads)
        observe = None if comparison is None else comparison.take
        results = run(items, progress=label, greedy=greedy, folder=folder, repeated=repeated, observe=observe)
        answers, folders = judged_answers(items, results, tokenizer, greedy), [folder] * len(items)
        own = in_own_words(items, results, answers, greedy) if baseline is None else {}
        if own:
            beside = folder.beside(workloads_digest(list(own.values())))
            again = run(list(own.values()), progress=labelled(label, "own answers: "), folder=beside)
            for (i, item), result in zip(own.items(), again, strict=True):
                if result.statistics.baseline_nll.sum() < results[i].statistics.baseline_nll.sum():
                    trace = Exercised.merged([results[i].trace, result.trace])
                    items[i], folders[i] = item, beside
                    results[i] = replace(result, answer=results[i].answer, trace=trace)
        names = [item.sample.id for item in items]
        scored = zip(names, results, folders, strict=True)
        recorded = ((name, kept.heads(result.sample)) for name, result, kept in scored if heads is None or name in repeated)
        write_heads(out / LOGPROBS, recorded)
        others = () if known is None else known.answers_to(encoded)
        answers = speculated(answers, items, config.speculation, greedy, label, others)
        conformance = None
        if comparison is not None:
            comparison.decode_missing()  # requests that had finished before an interruption
            label("conformance", 0, 1)
            conformance = comparison.result()
        elif not config.conformance_samples:
            conformance = EngineConformance(policy=engine.policy.name, requests=[])  # no gate passes an empty list
        Round(
            samples_digest=digest,
            vocab_size=engine.vocab_size,
            policy=engine.policy.name,
            takes_effect=engine.policy.takes_effect,
            coverage=Exercised.merged([result.trace for result in results]),
            conformance=conformance,
            compute_dtype=None if reference is None else reference.compute_dtype,
            scale_changes=changes,
            right_answers={item.sample.id: list(item.reference) for item in items if item.replaced and heads is None},
            answers={name: answer for name, answer in zip(names, answers, strict=True) if answer is not None},
            statistics={name: result.statistics for name, result in zip(names, results, strict=True)},
        ).write(out)


UNLIKELY = 0.1
"""Probability below which a reference counts as a phrasing that the baseline would not use for the answer."""


def in_own_words(
    encoded: Sequence[EncodedSample], results: Sequence[SampleResult], answers: Sequence[Answer | None], greedy: Greedy
) -> dict[int, EncodedSample]:
    """Return samples with the baseline's right answer as their reference, if their reference was unlikely, by index.

    Samples with scored `results` keep their reference, because the baseline's answer has no such token ranges.

    Args:
        encoded: The tokenized samples.
        results: The baseline's results.
        answers: The baseline's answers; None for samples that are not judged.
        greedy: End conditions of answers.
    """
    instead = {}
    for i, (item, result, answer) in enumerate(zip(encoded, results, answers, strict=True)):
        if answer is None or not answer.correct or item.results:
            continue
        if probability(result.statistics.baseline_nll, item) >= UNLIKELY:
            continue
        said = greedy.said(answer.tokens, item)
        if tuple(said) != item.reference:
            instead[i] = item.answered(said)
    return instead


def audit_scales(engine: Engine, allowed: Collection[ScaleChangeKind]) -> list[ScaleChange] | None:
    """Return the scales that differ between an engine and its checkpoint; None if the engine does not load scales by itself.

    Raises:
        GateRefusal: `gates.allow_scale_changes` does not accept some of the changes.
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
