"""Servers by URL: one forced token a request over what earlier requests left in the prefix cache, and free answers.

The rounds' directories are those of engines that run here (`stored`), and so is the report of them (`joining`). What a server
does not show is null there: no twin, no stress probe, no memory.
"""

import random
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.artifacts.server import ServedEngine
from pipeline.core.errors import UserError
from pipeline.core.records import Progress, Sample
from pipeline.core.workloads import LoadConfig, WorkloadsConfig
from pipeline.verdict.coverage import FreeAnswers
from pipeline.verdict.delivery import ServerSeen
from pipeline.verdict.record import finite
from pipeline.verdict.report import Canary, NoiseFloor, SystemMetrics, Work
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.interruption import Interruption, interruption
from stages.evaluate.decoding.noise import first_of_each_workload, greedy_of, judged_answers, labelled, repeated_samples
from stages.evaluate.decoding.results import ResultFolder, SampleResult, unfinished
from stages.evaluate.decoding.rows import Answer, make_rows
from stages.evaluate.decoding.stored import (
    LOGPROBS,
    BaselineRound,
    CandidateRound,
    read_baseline,
    write_answers,
    write_record,
    write_statistics,
)
from stages.evaluate.distances import metrics
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.distances.scores import BaselineHeads
from stages.evaluate.inputs.tokens import EncodedSample, Tokenizer, encode, workloads_digest
from stages.evaluate.servers.asking import ask, run_served

SEED = 0
"""Seed of the prompts of the timed load, which are random tokens."""


def measure_server(
    engine: ServedEngine,
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    out: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress,
    first: bool,
) -> None:
    """Ask the baseline's server a round's samples and write what candidates are compared with, as `measure_baseline` does.

    Raises:
        UserError: Its log-probabilities are not finite, or a sample has too few tokens.
        MissingRequirement: The server is gone, too slow, or shows too little; what was finished is kept.
        KeyboardInterrupt: The user asked for an end; the samples that have finished are kept.
    """
    encoded = encode(samples, tokenizer, config.max_scored_tokens)
    greedy, named = greedy_of(tokenizer, config), labelled(progress, "baseline: ")
    with unfinished(out, workloads_digest(encoded)) as folder:
        with interruption() as noted:
            results = run_served(engine, encoded, None, config.batch_size, named, greedy, folder, noted)
        broken = next((i for i, result in enumerate(results) if not np.isfinite(result.statistics.baseline_nll).all()), None)
        if broken is not None:
            name = encoded[broken].sample.id
            raise UserError(f"backend.baseline_url={engine.url}: shows numbers that are not finite on sample {name}")
        BaselineHeads.write(out / LOGPROBS, ((item.sample.id, folder.heads(i)) for i, item in enumerate(encoded)))
        answers = judged_answers(encoded, results, tokenizer)
        write_answers(out, encoded, answers)
        repeated = repeated_samples(encoded, config) if first else []
        heads = BaselineHeads(out / LOGPROBS)
        noise, free = _again(engine, encoded, repeated, heads, answers, tokenizer, greedy, named)
        record = BaselineRound(
            samples_digest=workloads_digest(encoded),
            vocab_size=engine.vocab_size,
            noise=noise if first else None,
            probe=None,
            free_answers=free if first else None,
            system=_system(engine, config.load, named) if first else None,
            served=_seen(engine, encoded, results, config.batch_size),
        )
        write_record(out, record)


def compare_server(
    engine: ServedEngine,
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    baseline_dir: Path,
    out: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress,
    first: bool,
    canary: ServedEngine | None,
) -> None:
    """Ask a candidate's server a round's samples and compare it with the baseline, as `evaluate_round` does.

    Args:
        engine: The server.
        samples: The samples of the round.
        tokenizer: The tokenizer of the model.
        baseline_dir: What `measure_server` wrote of the same round.
        out: Receives what `evaluate_round` writes.
        config: Requests in flight, limits, the canary and the timed load.
        progress: Called with a label, the tokens done, and the tokens in all.
        first: Whether this is the first round, on which canary, noise floor and times are measured.
        canary: The server with a corrupted scale; None where there is none.

    Raises:
        As `measure_server`.
    """
    encoded = encode(samples, tokenizer, config.max_scored_tokens)
    digest, greedy, heads = workloads_digest(encoded), greedy_of(tokenizer, config), BaselineHeads(baseline_dir / LOGPROBS)
    if read_baseline(baseline_dir).samples_digest != digest:
        raise UserError(f"workloads: {baseline_dir} was measured on other samples; delete that directory")
    with unfinished(out, digest) as folder:
        with interruption() as noted:
            results = run_served(engine, encoded, heads, config.batch_size, progress, greedy, folder, noted)
        answers = judged_answers(encoded, results, tokenizer)
        write_answers(out, encoded, answers)
        write_statistics(out, StepStatistics.joined([result.statistics for result in results]))
        repeated = repeated_samples(encoded, config) if first else []
        with tempfile.TemporaryDirectory() as scratch:
            own = _own_heads(engine, [encoded[i] for i in repeated], config, progress, Path(scratch)) if repeated else heads
            noise, free = _again(engine, encoded, repeated, own, answers, tokenizer, greedy, progress)
        record = CandidateRound(
            samples_digest=digest,
            policy=engine.policy.name,
            work=_work(results),
            checks=[],
            canary=_canary(canary, encoded, heads, config, progress) if first else None,
            coverage=None,
            noise=noise if first else None,
            probe=None,
            free_answers=free if first else None,
            system=_system(engine, config.load, progress) if first else None,
            served=_seen(engine, encoded, results, config.batch_size),
            top_logprobs=engine.top_logprobs,
            canary_url=None if canary is None else canary.url,
        )
        write_record(out, record)


def _own_heads(
    engine: ServedEngine, subset: Sequence[EncodedSample], config: WorkloadsConfig, progress: Progress, scratch: Path
) -> BaselineHeads:
    """Return the candidate's own distributions on some samples, which its noise is measured from."""
    folder, path = ResultFolder(scratch / "results"), scratch / LOGPROBS
    run_served(engine, subset, None, config.batch_size, labelled(progress, "noise floor: "), None, folder, Interruption())
    BaselineHeads.write(path, ((item.sample.id, folder.heads(i)) for i, item in enumerate(subset)))
    return BaselineHeads(path)


def _again(
    engine: ServedEngine,
    encoded: Sequence[EncodedSample],
    repeated: Sequence[int],
    heads: BaselineHeads,
    answers: Sequence[Answer | None],
    tokenizer: Tokenizer,
    greedy: Greedy,
    progress: Progress,
) -> tuple[NoiseFloor, FreeAnswers]:
    """Ask some samples again, one after the other: the A/A noise beside `heads`, and free answers beside forced ones."""
    asked = []
    for done, i in enumerate(repeated):
        progress("noise floor [samples]", done, len(repeated))
        asked.append(ask(engine, encoded[i], heads.sample(encoded[i].sample.id), greedy, threading.Event()))
    subset, results = [encoded[i] for i in repeated], [one.result for one in asked]
    contradictions = [one.contradiction for one in asked if one.contradiction is not None]
    tokens = sum(len(result.answer) for result in results if result.answer is not None)
    samples = sum(result.answer is not None for result in results)
    free = FreeAnswers(samples=samples, tokens=tokens, contradictions=contradictions)
    if not repeated:
        return NoiseFloor(samples=0, fidelity=None, answer_flips=0), free
    again = zip(repeated, judged_answers(subset, results, tokenizer), strict=True)
    flips = sum(one is not None and one.judgement != answers[i].judgement for i, one in again)  # type: ignore[union-attr]
    statistics = StepStatistics.joined([result.statistics for result in results])
    return NoiseFloor(samples=len(repeated), fidelity=metrics.fidelity(statistics), answer_flips=flips), free


def _canary(
    engine: ServedEngine | None,
    encoded: Sequence[EncodedSample],
    heads: BaselineHeads,
    config: WorkloadsConfig,
    progress: Progress,
) -> Canary:
    """Ask the corrupted server the samples with the longest prompts: as many as any canary takes."""
    if engine is None:
        return Canary(factor=None, rows=[])
    longest = sorted(encoded, key=lambda item: -len(item.prompt))
    subset = longest[: len(first_of_each_workload(encoded, config.canary_samples))]
    with tempfile.TemporaryDirectory() as scratch:
        folder, named = ResultFolder(Path(scratch)), labelled(progress, "canary: ")
        results = run_served(engine, subset, heads, config.batch_size, named, None, folder, Interruption())
    nothing = [None] * len(subset)
    return Canary(factor=None, rows=make_rows(subset, [result.statistics for result in results], nothing, nothing))


def _seen(engine: ServedEngine, encoded: Sequence[EncodedSample], results: Sequence[SampleResult], together: int) -> ServerSeen:
    seen = np.concatenate([result.seen for result in results if result.seen is not None])
    mass, prompts, cached = seen.T
    return ServerSeen(
        url=engine.url,
        model=engine.model,
        release=engine.release,
        says=engine.says,
        tokens=len(seen),
        shown_mass=finite(float(mass.mean())),
        least_shown_mass=finite(float(mass.min())),
        prompt_tokens=int(prompts.sum()),
        cached_tokens=int(cached.sum()) if np.isfinite(cached).all() else None,
        longest_context=max(len(item.prompt) + len(item.reference) for item in encoded),
        together=min(together, len(encoded)),
    )


def _work(results: Sequence[SampleResult]) -> Work:
    prefilled = sum(result.prefilled for result in results)
    return Work(prefilled_tokens=prefilled, shared_tokens=0, decoded_tokens=sum(result.decoded for result in results))


def _system(engine: ServedEngine, load: LoadConfig, progress: Progress) -> SystemMetrics:
    """Time the fixed load as a client sees it. Of the server's memory nothing is known."""
    progress("system metrics", 0, 1)
    rng = random.Random(SEED)
    prompts = [[rng.randrange(engine.vocab_size) for _ in range(load.context_tokens)] for _ in range(load.batch)]
    times = engine.timed(prompts, load.new_tokens)
    unknown = dict.fromkeys(
        ("inter_token_p50_ms", "inter_token_p95_ms", "inter_token_p99_ms", "kib_per_token", "kib_per_token_allocated",
         "pool_bytes", "exact_bytes", "window_bytes", "static_scale_bytes", "max_live_tokens")
    )  # fmt: skip
    return SystemMetrics(
        batch=load.batch,
        context_tokens=load.context_tokens,
        new_tokens=load.new_tokens,
        time_to_first_token_ms=float(np.median(times.first_token_ms)),
        decode_tokens_per_s=times.tokens_per_s,
        budget_gib=load.budget_gib,
        sequence_tokens=load.sequence_tokens,
        **unknown,
    )
