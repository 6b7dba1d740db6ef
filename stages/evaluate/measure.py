"""The two halves of an evaluation, in rounds: the baseline is measured once, and every candidate is compared with that.

A round is some of the samples (`rounds.assign_rounds`); `stored` says what its directory holds, and `joining` makes the report
of the rounds that ran. While a round runs, `unfinished/` in its directory holds the results of the samples that have finished.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pipeline.core.errors import UserError
from pipeline.core.records import Engine, Progress, Sample
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.report import Canary, NoiseFloor, SystemMetrics, Work
from stages.evaluate import metrics
from stages.evaluate.batches import Greedy
from stages.evaluate.checks import judge
from stages.evaluate.decode import shares
from stages.evaluate.distance import StepStatistics
from stages.evaluate.interruption import interruption
from stages.evaluate.results import ResultFolder, SampleResult
from stages.evaluate.rows import Answer, make_rows, run_samples
from stages.evaluate.scores import BaselineHeads
from stages.evaluate.stored import (
    LOGPROBS,
    BaselineRound,
    CandidateRound,
    read_baseline,
    write_answers,
    write_record,
    write_statistics,
)
from stages.evaluate.system import measure_system
from stages.evaluate.tokens import EncodedSample, Tokenizer, encode, workloads_digest

UNFINISHED = "unfinished"

OpenEngine = Callable[[], Engine]


def _first_of_each_workload(encoded: Sequence[EncodedSample], count: int) -> list[int]:
    """Return the indices of the first `count` samples of every workload."""
    counts: dict[str, int] = {}
    indices = []
    for i, item in enumerate(encoded):
        counts[item.sample.workload] = counts.get(item.sample.workload, 0) + 1
        if counts[item.sample.workload] <= count:
            indices.append(i)
    return indices


def _labelled(progress: Progress, prefix: str) -> Progress:
    return lambda label, done, total: progress(f"{prefix}{label}", done, total)


@contextmanager
def _unfinished(out: Path, digest: str) -> Iterator[ResultFolder]:
    """Give the folder of the samples that have finished; it goes when all of them have.

    Results of an interrupted call count only for samples with the same digest.
    """
    root = out / UNFINISHED
    for other in root.glob("*"):
        if other.name != digest:
            shutil.rmtree(other)
    yield ResultFolder(root / digest)
    shutil.rmtree(root)


def measure_baseline(
    open_engine: OpenEngine,
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    out: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress,
    first: bool = True,
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
        first: Whether this is the first round, on which noise floor and system metrics are measured.

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

    with _unfinished(out, workloads_digest(encoded)) as folder:
        with interruption() as noted:
            results = run_samples(
                engine,
                encoded,
                None,
                config.batch_size,
                _labelled(progress, "baseline: "),
                greedy=_greedy(tokenizer, config),
                folder=folder,
                check=refuse_not_finite,
                interruption=noted,
            )
        BaselineHeads.write(out / LOGPROBS, ((item.sample.id, folder.heads(i)) for i, item in enumerate(encoded)))
        answers = _answers(encoded, results, tokenizer)
        write_answers(out, encoded, answers)
        heads = BaselineHeads(out / LOGPROBS)
        noise = _noise_floor(engine, encoded, answers, heads, tokenizer, config, progress) if first else None
        system = _system(engine, config, _labelled(progress, "baseline: ")) if first else None
        record = BaselineRound(
            samples_digest=workloads_digest(encoded), vocab_size=engine.vocab_size, noise=noise, system=system
        )
        write_record(out, record)


def _greedy(tokenizer: Tokenizer, config: WorkloadsConfig) -> Greedy:
    return Greedy(tokenizer.eos_token_id, config.extra_new_tokens)


def _system(engine: Engine, config: WorkloadsConfig, progress: Progress) -> SystemMetrics:
    progress("system metrics", 0, 1)
    return measure_system(engine, config.load)


def _answers(encoded: Sequence[EncodedSample], results: Sequence[SampleResult], tokenizer: Tokenizer) -> list[Answer | None]:
    """Judge the answers; None for a sample that is not judged."""
    texts = [None if result.answer is None else tokenizer.text(result.answer) for result in results]
    pairs = zip(encoded, texts, strict=True)
    return [None if text is None else Answer(text, judge(item.sample, text)) for item, text in pairs]


def _noise_floor(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    answers: Sequence[Answer | None],
    heads: BaselineHeads,
    tokenizer: Tokenizer,
    config: WorkloadsConfig,
    progress: Progress,
) -> NoiseFloor:
    """Measure the A/A noise: compare the baseline with itself on some samples in another batch composition.

    Sequences run one by one, or in pairs if they ran one by one before, and token by token even where the engine can run
    them in one pass.
    """
    indices = _first_of_each_workload(encoded, config.noise_samples)
    if not indices:
        return NoiseFloor(samples=0, fidelity=None, answer_flips=0)
    subset = [encoded[i] for i in indices]
    results = run_samples(
        engine,
        subset,
        heads,
        1 if config.batch_size > 1 else 2,
        _labelled(progress, "baseline: noise floor: "),
        greedy=_greedy(tokenizer, config),
        one_pass=False,
    )
    repeated = zip(indices, _answers(subset, results, tokenizer), strict=True)
    flips = sum(a is not None and a.judgement != answers[i].judgement for i, a in repeated)  # type: ignore[union-attr]
    statistics = StepStatistics.joined([result.statistics for result in results])
    return NoiseFloor(samples=len(indices), fidelity=metrics.fidelity(statistics), answer_flips=flips)


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
        first: Whether this is the first round, on which canary and system metrics are measured.

    Raises:
        UserError: A sample has too few tokens.
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
    heads = BaselineHeads(baseline_dir / LOGPROBS)
    with _unfinished(out, digest) as folder:
        with interruption() as noted:
            results = run_samples(
                engine,
                encoded,
                heads,
                config.batch_size,
                progress,
                greedy=_greedy(tokenizer, config),
                folder=folder,
                interruption=noted,
            )
        write_answers(out, encoded, _answers(encoded, results, tokenizer))
        write_statistics(out, StepStatistics.joined([result.statistics for result in results]))
        record = CandidateRound(
            samples_digest=digest,
            policy=engine.policy.name,
            work=_work(encoded, results, shared=shares(engine, config.batch_size)),
            checks=[(_number(full), _number(head)) for result in results for full, head in result.checks.tolist()],
            canary=_canary(open_engine(), encoded, heads, config, progress) if first else None,
            system=_system(engine, config, progress) if first else None,
        )
        write_record(out, record)


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


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


def _canary(
    engine: Engine, encoded: Sequence[EncodedSample], heads: BaselineHeads, config: WorkloadsConfig, progress: Progress
) -> Canary:
    """Run forced decode that reads wrong keys: prefill some samples together, corrupt the key scale once, then decode."""
    # The longest prompts are taken: a short prompt may consist of exact sink and recent tokens, and then reads no scale.
    count = len(_first_of_each_workload(encoded, config.canary_samples))
    subset = sorted(encoded, key=lambda item: -len(item.prompt))[:count]
    results = run_samples(
        engine,
        subset,
        heads,
        len(subset),  # one batch: there is one prefill, and the corruption comes after it
        _labelled(progress, "canary: "),
        greedy=None,
        after_prefill=lambda: engine.corrupt_key_scale(config.canary_factor),
    )
    no_answers = [None] * len(subset)
    statistics = [result.statistics for result in results]
    return Canary(factor=config.canary_factor, rows=make_rows(subset, statistics, no_answers, no_answers))
