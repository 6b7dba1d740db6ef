"""A round of an evaluation: an engine, baseline or candidate, is asked the round's samples, and what it gives is written.

While a round runs, `unfinished/` in its directory holds the results of the samples that have finished.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.errors import UserError
from pipeline.core.records import Progress
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.conformance import EngineConformance
from pipeline.verdict.coverage import Exercised
from pipeline.verdict.delivery import audit_scales
from pipeline.verdict.record import finite
from pipeline.verdict.thresholds import ScaleChangeKind
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.noise import repeated_samples
from stages.evaluate.decoding.results import ResultFolder, SampleResult, unfinished
from stages.evaluate.decoding.rows import (
    Answer,
    Run,
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
from stages.evaluate.distances.scores import SampleHeads, StoredHeads
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, workloads_digest
from stages.evaluate.twins.conformance import Comparison, spread
from stages.evaluate.twins.twin import Twin

NOT_FINITE = "backend.compute_dtype: use float32, the baseline's logits are not finite"


def measure(
    engine: "JudgedEngine",
    encoded: Sequence[EncodedSample],
    tokenizer: BundleTokenizer,
    out: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress,
    baseline: Path | None = None,
) -> None:
    """Ask an engine the samples of a round; a candidate is compared with the baseline.

    The heads of the baseline are kept, and those of the samples that the candidate repeats later (`noise.repeated_samples`).
    Where the baseline answers rightly and finds its own words likelier than the reference, its own words are scored, of both.

    Args:
        engine: The engine, and what it is compared with.
        encoded: The samples of the round.
        tokenizer: The tokenizer of the engine bundle.
        out: A directory that is empty, or was left by an interrupted call with the same arguments. It receives what
            `stored.read_round` and `scores.StoredHeads` read.
        config: Batch size and limits.
        progress: Called with a label, the tokens done, and the tokens in all.
        baseline: What this function wrote of the baseline in the same round; None for the baseline itself.

    Raises:
        UserError: The baseline's logits are not finite, or the candidate's vocabulary is another one.
        GateRefusal: The engine uses other scales than its checkpoint carries.
        KeyboardInterrupt: The user asked for an end; the samples that have finished are kept.
    """
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

    with unfinished(out, workloads_digest(scored)) as folder:

        def run(
            items: Sequence[EncodedSample], into: ResultFolder, greedy: Greedy | None, label: Progress
        ) -> list[SampleResult]:
            def keep(i: int, result: SampleResult, own: SampleHeads | None) -> None:
                if heads is None and not np.isfinite(result.statistics.baseline_nll).all():
                    raise UserError(f"{NOT_FINITE} on sample {items[i].sample.id}")
                into.save(i, result, own)

            asked = Run(items, heads, label, greedy, into.load(), keep, noted, repeated=repeated, conformance=usual)
            return engine.run(asked)

        with interruption() as noted:
            results = run(scored, folder, greedy, named)
            said = judged_answers(scored, results, tokenizer, greedy)
            own = in_own_words(scored, results, said, greedy) if heads is None else {}
            items, kept = list(own.values()), [(folder, i) for i in range(len(scored))]
            if items:
                again = folder.beside(workloads_digest(items))
                anew = run(items, again, None, labelled(named, "own answers: "))
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
        answers = {item.sample.id: answer for item, answer in zip(encoded, said, strict=True) if answer is not None}
        record = Measured(
            samples_digest=digest,
            vocab_size=engine.vocab_size,
            policy=engine.policy.name,
            takes_effect=engine.policy.takes_effect,
            missed=[finite(kl) for result in results for kl in result.missed.tolist()],
            right_answers={item.sample.id: list(item.reference) for item in scored if item.replaced and heads is None},
            **engine.seen(results, named),
        )
        Round(record, answers, StepStatistics.joined([result.statistics for result in results])).write(out)


class JudgedEngine:
    """An engine beside its twin in the first round."""

    def __init__(
        self,
        engine: Engine,
        config: WorkloadsConfig,
        twin: Twin | None = None,
        allow_scale_changes: Collection[ScaleChangeKind] = (),
        *,
        uncompared: bool = False,
    ) -> None:
        """Audit the scales of an engine.

        Args:
            engine: The engine.
            config: Batch size, samples that are compared with the twin, and context bins.
            twin: What it is compared with; None compares nothing.
            allow_scale_changes: What the engine may make of the scales that its checkpoint carries.
            uncompared: Whether the record says that no request was compared, so that nothing passes.

        Raises:
            GateRefusal: The engine uses other scales than its checkpoint carries.
        """
        self.engine, self.config, self.twin, self.uncompared = engine, config, twin, uncompared
        self.policy, self.vocab_size = engine.policy, engine.vocab_size
        self.changes = audit_scales(engine, allow_scale_changes)
        self.comparison: Comparison | None = None

    def run(self, run: Run) -> list[SampleResult]:
        """Decode the samples, forced, the first time while the twin looks on."""
        observe = None
        if self.twin is not None and self.comparison is None:
            self.comparison = self._comparison(self.twin, run)
            observe = self.comparison.take
        return run_samples(self.engine, run, self.config.batch_size, observe=observe)

    def seen(self, results: Sequence[SampleResult], progress: Progress) -> dict[str, Any]:
        """Return coverage, scales, and how far the engine is from its twin."""
        conformance = None
        if self.comparison is not None:  # requests that had finished before an interruption are decoded again for it
            self.comparison.decode_missing()
            progress("conformance", 0, 1)
            conformance = self.comparison.result()
        elif self.uncompared:
            conformance = EngineConformance(policy=self.policy.name, requests=[])  # which passes nothing
        return {
            "coverage": Exercised.merged([result.trace for result in results]),
            "conformance": conformance,
            "compute_dtype": None if self.twin is None else self.twin.compute_dtype,
            "scale_changes": self.changes,
        }

    def _comparison(self, twin: Twin, run: Run) -> Comparison:
        """Prepare the comparison; a candidate may be as far from its twin as its baseline makes usual."""
        limit, layers = twin.limits(run.conformance)
        return Comparison(
            self.engine,
            twin.beside(run.conformance),
            run,
            spread(run.encoded, self.config.conformance_samples),
            batch_size=self.config.batch_size,
            limit=limit,
            layers=layers,
        )


UNLIKELY = 0.1
"""A reference of less probability under a baseline that answers rightly is not how it says the answer."""


def in_own_words(
    encoded: Sequence[EncodedSample], results: Sequence[SampleResult], answers: Sequence[Answer | None], greedy: Greedy
) -> dict[int, EncodedSample]:
    """Return the samples whose reference the baseline finds unlikely, with its own right answer instead, by their place.

    Where results are scored, each given the steps before, an answer of its own would have no such results.

    Args:
        encoded: The samples in tokens.
        results: What came of the baseline.
        answers: Its answers, None where the sample is not judged.
        greedy: How answers end.
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
    """Return whether the baseline finds its own words more likely than the reference."""
    return bool(own.statistics.baseline_nll.sum() < reference.statistics.baseline_nll.sum())
