"""The two halves of an evaluation, in rounds: the baseline is measured once, and every candidate is compared with that.

A round is some of the samples (`rounds.assign_rounds`); `stored` says what its directory holds, and `joining` makes the report
of the rounds that ran. While a round runs, `unfinished/` in its directory holds the results of the samples that have finished.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.errors import UserError
from pipeline.core.records import Progress, Sample
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.conformance import ALLOWED, MEASURED_ALLOWED, EngineConformance, allowed
from pipeline.verdict.coverage import FreeAnswers, Probe
from pipeline.verdict.record import finite
from pipeline.verdict.report import SystemMetrics, Work
from pipeline.verdict.thresholds import ScaleChangeKind
from stages.evaluate.canary import canary
from stages.evaluate.decoding.batches import Step
from stages.evaluate.decoding.coverage import coverage
from stages.evaluate.decoding.decode import shares
from stages.evaluate.decoding.free import free_answers
from stages.evaluate.decoding.interruption import interruption
from stages.evaluate.decoding.noise import (
    candidate_noise,
    greedy_of,
    judged_answers,
    labelled,
    noise_floor,
    repeated_samples,
)
from stages.evaluate.decoding.results import SampleResult, unfinished
from stages.evaluate.decoding.rows import run_samples
from stages.evaluate.decoding.speculation import speculated
from stages.evaluate.decoding.stored import (
    LOGPROBS,
    BaselineRound,
    CandidateRound,
    read_answers,
    read_baseline,
    write_answers,
    write_record,
    write_statistics,
)
from stages.evaluate.decoding.system import measure_system
from stages.evaluate.delivery import audit_scales
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.distances.scores import BaselineHeads
from stages.evaluate.inputs.tokens import EncodedSample, Tokenizer, encode, workloads_digest
from stages.evaluate.reuse import reused_prefixes
from stages.evaluate.twins.conformance import Comparison, spread
from stages.evaluate.twins.probe import probe
from stages.evaluate.twins.twin import OpenTwin, Twin

OpenEngine = Callable[[], Engine]


def measure_baseline(
    open_engine: OpenEngine,
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    out: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress,
    first: bool = True,
    open_twin: OpenTwin | None = None,
) -> None:
    """Run the baseline engine on a round's samples and write what candidates are compared with.

    Args:
        open_engine: Loads the FP16-KV engine.
        samples: The samples of the round.
        tokenizer: The tokenizer of the engine bundle.
        out: A directory that is empty, or was left by an interrupted call with the same arguments. It receives
            `logprobs.safetensors`, `answers.jsonl` and `round.json`.
        config: Batch size, limits and the load of the system metrics.
        progress: Called with a label, the tokens done, and the tokens in all.
        first: Whether this is the first round, on which noise floor and system metrics are measured, and the stress probe runs.
        open_twin: Loads the oracle that a first round's engine is compared with; None compares nothing, and runs no probe.

    Raises:
        UserError: The baseline's logits are not finite, or a sample has too few tokens.
        KeyboardInterrupt: The user asked for an end; the samples that have finished are kept.
    """
    encoded = encode(samples, tokenizer, config.max_scored_tokens)
    engine = open_engine()

    def refuse_not_finite(i: int, result: SampleResult) -> None:
        if not np.isfinite(result.statistics.baseline_nll).all():
            name = encoded[i].sample.id
            raise UserError(f"backend.compute_dtype: the baseline's logits are not finite on sample {name}; use float32")

    twin = open_twin() if first and open_twin is not None else None
    comparison = _comparison(engine, encoded, config, twin, labelled(progress, "baseline: "))
    with unfinished(out, workloads_digest(encoded)) as folder:
        with interruption() as noted:
            results = run_samples(
                engine,
                encoded,
                None,
                config.batch_size,
                labelled(progress, "baseline: "),
                greedy=greedy_of(tokenizer, config),
                folder=folder,
                check=refuse_not_finite,
                interruption=noted,
                observe=_observer(comparison),
            )
        BaselineHeads.write(out / LOGPROBS, ((item.sample.id, folder.heads(i)) for i, item in enumerate(encoded)))
        named, greedy = labelled(progress, "baseline: "), greedy_of(tokenizer, config)
        answers = speculated(judged_answers(encoded, results, tokenizer), encoded, config.speculation, greedy, named)
        write_answers(out, encoded, answers)
        heads = BaselineHeads(out / LOGPROBS)
        repeated = repeated_samples(encoded, config)
        noise = noise_floor(engine, encoded, repeated, answers, heads, tokenizer, config, named)[0] if first else None
        record = BaselineRound(
            samples_digest=workloads_digest(encoded),
            vocab_size=engine.vocab_size,
            noise=noise,
            probe=_probe(engine, twin, config, named),
            free_answers=_free(engine, [encoded[i] for i in repeated], tokenizer, config, named) if first else None,
            system=_system(engine, config, named) if first else None,
            conformance=_conclude(comparison, named),
            reused=reused_prefixes(engine, [encoded[i] for i in repeated]) if first else None,
        )
        write_record(out, record)


def _free(
    engine: Engine, encoded: Sequence[EncodedSample], tokenizer: Tokenizer, config: WorkloadsConfig, progress: Progress
) -> FreeAnswers:
    return free_answers(engine, encoded, config.batch_size, greedy_of(tokenizer, config), progress)


def _system(engine: Engine, config: WorkloadsConfig, progress: Progress) -> SystemMetrics:
    return measure_system(engine, config.load, progress)


def _probe(engine: Engine, twin: Twin | None, config: WorkloadsConfig, progress: Progress) -> Probe | None:
    return None if twin is None else probe(engine, twin, config.probe, config.batch_size, progress)


def evaluate_round(
    open_engine: OpenEngine,
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    baseline_dir: Path,
    out: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress,
    first: bool = True,
    open_twin: OpenTwin | None = None,
    allow_scale_changes: Collection[ScaleChangeKind] = (),
) -> None:
    """Run a candidate engine on a round's samples and compare it with the baseline.

    Args:
        open_engine: Loads the candidate. In the first round it is called twice, because the canary corrupts the engine that
            it runs on.
        samples: The samples of the round.
        tokenizer: The tokenizer of the engine bundle.
        baseline_dir: What `measure_baseline` wrote of the same round.
        out: A directory that is empty, or was left by an interrupted call with the same arguments. It receives
            `statistics.safetensors`, `answers.jsonl` and `round.json`.
        config: Batch size, limits, the canary and the load of the system metrics.
        progress: Called with a label, the tokens done, and the tokens in all.
        first: Whether this is the first round, on which canary, noise floor and system metrics are measured, and the stress
            probe runs.
        open_twin: Loads the oracle that a first round's engine is compared with; None compares nothing, and runs no probe.
        allow_scale_changes: What the engine may make of the scales that its checkpoint carries.

    Raises:
        UserError: A sample has too few tokens.
        GateRefusal: The engine uses other scales than its checkpoint carries.
        ValueError: The baseline was measured on other samples or has another vocabulary.
        KeyboardInterrupt: The user asked for an end; the samples that have finished are kept.
    """
    encoded = encode(samples, tokenizer, config.max_scored_tokens)
    digest = workloads_digest(encoded)
    baseline = read_baseline(baseline_dir)
    engine = open_engine()
    if (baseline.samples_digest, baseline.vocab_size) != (digest, engine.vocab_size):
        raise UserError(
            f"workloads: {baseline_dir} was measured on other samples or another vocabulary than the candidate's "
            "(the chat template or the texts changed); delete that directory, so that the baseline is measured again"
        )
    changes = audit_scales(engine, allow_scale_changes) if first else None
    heads = BaselineHeads(baseline_dir / LOGPROBS)
    twin = open_twin().beside(baseline.conformance) if first and open_twin is not None else None
    comparison = _comparison(engine, encoded, config, twin, progress, (baseline, heads))
    with unfinished(out, digest) as folder:
        with interruption() as noted:
            results = run_samples(
                engine,
                encoded,
                heads,
                config.batch_size,
                progress,
                greedy=greedy_of(tokenizer, config),
                folder=folder,
                interruption=noted,
                observe=_observer(comparison),
            )
        greedy, known = greedy_of(tokenizer, config), read_answers(baseline_dir, encoded)
        answers = judged_answers(encoded, results, tokenizer)
        answers = speculated(answers, encoded, config.speculation, greedy, progress, known)
        write_answers(out, encoded, answers)
        write_statistics(out, StepStatistics.joined([result.statistics for result in results]))
        repeated = repeated_samples(encoded, config)
        traced = [(item, result.trace) for item, result in zip(encoded, results, strict=True)]
        noise = None
        if first and repeated:
            noise, again = candidate_noise(engine, encoded, repeated, answers, tokenizer, config, progress)
            traced += [(encoded[i], result.trace) for i, result in zip([*repeated, *repeated], again, strict=True)]
        record = CandidateRound(
            samples_digest=digest,
            policy=engine.policy.name,
            work=_work(encoded, results, shared=shares(engine, config.batch_size)),
            checks=[(finite(full), finite(head)) for result in results for full, head in result.checks.tolist()],
            canary=canary(open_engine(), encoded, heads, config, progress, twin) if first else None,
            coverage=coverage(traced, engine.policy, engine.shape, config.context_bins),
            noise=noise,
            probe=_probe(engine, twin, config, progress),
            free_answers=_free(engine, [encoded[i] for i in repeated], tokenizer, config, progress) if first else None,
            system=_system(engine, config, progress) if first else None,
            conformance=_conclude(comparison, progress),
            scale_changes=changes,
            reused=reused_prefixes(engine, [encoded[i] for i in repeated]) if first else None,
            compute_dtype=None if twin is None else twin.compute_dtype,
        )
        write_record(out, record)


def _comparison(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    config: WorkloadsConfig,
    twin: Twin | None,
    progress: Progress,
    baseline: tuple[BaselineRound, BaselineHeads] | None = None,
) -> Comparison | None:
    """Prepare the comparison of an engine with its twin; a candidate may be as far from its own as its baseline makes usual."""
    if twin is None:
        return None
    chosen = spread(encoded, config.conformance_samples)
    if baseline is None:
        limit = MEASURED_ALLOWED if twin.measures else ALLOWED
        return Comparison(engine, twin, encoded, chosen, batch_size=config.batch_size, limit=limit, progress=progress)
    record, heads = baseline
    requests = record.conformance.requests if record.conformance is not None else []
    return Comparison(
        engine,
        twin,
        encoded,
        chosen,
        batch_size=config.batch_size,
        limit=MEASURED_ALLOWED if twin.measures else allowed(requests),
        baseline=lambda i: heads.sample(encoded[i].sample.id),
        layers=_stored_by_layer(record),
        progress=progress,
    )


def _stored_by_layer(record: BaselineRound) -> tuple[float, ...]:
    """Return how far what the baseline stores is off, by layer: the worst of its requests."""
    requests = record.conformance.requests if record.conformance is not None else []
    shown = [request.engine.stored_by_layer for request in requests if request.engine.stored_by_layer]
    return tuple(map(max, zip(*shown, strict=True)))


def _observer(comparison: Comparison | None) -> Callable[[Step], None]:
    return (lambda _: None) if comparison is None else comparison.take


def _conclude(comparison: Comparison | None, progress: Progress) -> EngineConformance | None:
    """Return what a comparison found. Requests that had finished before an interruption are decoded again for it."""
    if comparison is None:
        return None
    comparison.decode_missing()
    progress("conformance", 0, 1)
    return comparison.result()


def _work(encoded: Sequence[EncodedSample], results: Sequence[SampleResult], *, shared: bool) -> Work:
    """Count tokens; a prefix counts as prefilled once, however often an interruption made that happen."""
    prefilled = sum(result.prefilled for result in results)
    users: dict[tuple[str, tuple[int, ...]], int] = {}
    for item in encoded if shared else ():
        if item.shared:
            users[item.prefix] = users.get(item.prefix, 0) + 1
    return Work(
        prefilled_tokens=prefilled + sum(len(tokens) for _, tokens in users),
        shared_tokens=sum(len(tokens) * (count - 1) for (_, tokens), count in users.items()),
        decoded_tokens=sum(result.decoded for result in results),
    )
