"""Runs the samples of one round on an engine (baseline or candidate) and writes the measurements.

While a round runs, `unfinished/` in its directory holds the results of finished samples.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from stages.core.errors import GateRefusal, UserError
from stages.core.records import Progress
from stages.engines.capabilities import SupportsDelivery
from stages.engines.interface import Engine
from stages.evaluate.conformance.comparer import Comparer
from stages.evaluate.conformance.comparison import Comparison, spread
from stages.evaluate.conformance.engine import ReferenceEngine
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.noise import repeated_samples
from stages.evaluate.decoding.results import ResultFolder, SampleResult, unfinished
from stages.evaluate.decoding.rows import (
    Answer,
    Observer,
    SampleRun,
    greedy_of,
    interruption,
    judged_answers,
    labelled,
    probability,
    run_samples,
)
from stages.evaluate.decoding.speculation import speculated
from stages.evaluate.decoding.stored import LOGPROBS, Measured, Round, read_round
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.distances.scores import StoredHeads
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, workloads_digest
from stages.verdict.conformance import EngineConformance
from stages.verdict.coverage import Exercised
from stages.verdict.delivery import ScaleChange, describe_changes, scale_changes
from stages.verdict.thresholds import ScaleChangeKind
from stages.workloads.config import WorkloadsConfig

NOT_FINITE = "backend.compute_dtype: use float32, the baseline's logits are not finite"


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
            that `stored.read_round` and `scores.StoredHeads` read.
        config: Configuration with batch size, limits, and the number of samples to compare with the reference engine.
        progress: Called with a label, the number of tokens done, and the total.
        baseline: Directory that this function wrote for the baseline in the same round; None for the baseline itself.
        reference: The reference engine; None skips this comparison.
        allow_scale_changes: Allowed differences between the engine's scales and its checkpoint's scales.

    Raises:
        UserError: The baseline's logits are not finite, or the baseline had different samples or a different vocabulary.
        GateRefusal: The engine's scales differ from its checkpoint's scales in a way that is not allowed.
        KeyboardInterrupt: The user requested an end. Results of finished samples are kept.
    """
    changes = audit_scales(engine, allow_scale_changes)
    digest, greedy = workloads_digest(encoded), greedy_of(tokenizer, config)
    known, heads, usual, named, scored = None, None, None, labelled(progress, "baseline: "), list(encoded)
    if baseline is not None:
        known, heads, named = read_round(baseline), StoredHeads(baseline / LOGPROBS).sample, progress
        if (known.record.samples_digest, known.record.vocab_size) != (digest, engine.vocab_size):
            raise UserError(
                f"workloads: {baseline} was measured on other samples or another vocabulary than the candidate's; delete that "
                "directory, so that the baseline is measured again"
            )
        usual, scored = known.record.conformance, known.scored(encoded)
    repeated = {item.sample.id for item in repeated_samples(scored, config)}
    comparison = None
    if reference is not None:  # the baseline determines the allowed distance of a candidate from its reference engine
        comparer = Comparer(engine, reference.with_rounding_of(usual), *reference.limits(usual))
        chosen = spread(scored, config.conformance_samples)
        comparison = Comparison(comparer, SampleRun(scored, heads, named), chosen, batch_size=config.batch_size)

    with unfinished(out, workloads_digest(scored)) as folder:

        def run(
            items: Sequence[EncodedSample], into: ResultFolder, greedy: Greedy | None, label: Progress, observe: Observer | None
        ) -> list[SampleResult]:
            def keep(i: int, result: SampleResult) -> None:
                if heads is None and not np.isfinite(result.statistics.baseline_nll).all():
                    raise UserError(f"{NOT_FINITE} on sample {items[i].sample.id}")
                into.save(i, result)

            asked = SampleRun(items, heads, label, greedy, into.load(), keep, noted, repeated)
            return run_samples(engine, asked, config.batch_size, observe=observe)

        with interruption() as noted:
            results = run(scored, folder, greedy, named, None if comparison is None else comparison.take)
            said = judged_answers(scored, results, tokenizer, greedy)
            own = in_own_words(scored, results, said, greedy) if heads is None else {}
            items, kept = list(own.values()), [(folder, i) for i in range(len(scored))]
            if items:
                again = folder.beside(workloads_digest(items))
                anew = run(items, again, None, labelled(named, "own answers: "), None)
                for place, (i, result) in enumerate(zip(own, anew, strict=True)):
                    if likelier(result, results[i]):
                        scored[i], results[i], kept[i] = items[place], results[i].scored_anew(result), (again, place)
        stored = (
            (item.sample.id, of.heads(i))
            for item, (of, i) in zip(scored, kept, strict=True)
            if heads is None or item.sample.id in repeated
        )
        StoredHeads.write(out / LOGPROBS, stored)
        beside: Sequence[Answer | None] = known.answers_to(encoded) if known is not None else ()
        said = speculated(said, scored, config.speculation, greedy, named, beside)
        conformance = None
        if comparison is not None:
            comparison.decode_missing()  # requests that had finished before an interruption
            named("conformance", 0, 1)
            conformance = comparison.result()
        elif not config.conformance_samples:
            conformance = EngineConformance(policy=engine.policy.name, requests=[])  # no gate passes an empty list
        answers = {item.sample.id: answer for item, answer in zip(encoded, said, strict=True) if answer is not None}
        record = Measured(
            samples_digest=digest,
            vocab_size=engine.vocab_size,
            policy=engine.policy.name,
            takes_effect=engine.policy.takes_effect,
            coverage=Exercised.merged([result.trace for result in results]),
            conformance=conformance,
            compute_dtype=None if reference is None else reference.compute_dtype,
            scale_changes=changes,
            right_answers={item.sample.id: list(item.reference) for item in scored if item.replaced and heads is None},
        )
        Round(record, answers, StepStatistics.joined([result.statistics for result in results])).write(out)


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
        if answer is None or not answer.judgement.correct or item.results:
            continue
        if probability(result.statistics.baseline_nll, item) >= UNLIKELY:
            continue
        said = greedy.said(answer.tokens, item)
        if tuple(said) != item.reference:
            instead[i] = item.answered(said)
    return instead


def likelier(own: SampleResult, reference: SampleResult) -> bool:
    """Return whether the baseline's own answer is more likely than the reference."""
    return bool(own.statistics.baseline_nll.sum() < reference.statistics.baseline_nll.sum())


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
