"""The two halves of an evaluation: the baseline is measured once, and every candidate is compared with that record.

The directory of a baseline holds `logprobs.safetensors` (see `scores`), `answers.jsonl` and `baseline.json` (the digest of
the samples, the A/A noise floor, the system metrics). The directory of a candidate holds `report.json`, `samples.jsonl`
and `tokens.safetensors`: the statistics of every scored token, in the order of `samples.jsonl`, `scored_tokens` of them
for each of its rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from pipeline.core.errors import UserError
from pipeline.core.records import Engine, Progress, Sample
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.report import (
    REPORT_FILE,
    SAMPLES_FILE,
    SCHEMA_VERSION,
    Canary,
    EvaluationReport,
    NoiseFloor,
    SystemMetrics,
    jsonl_lines,
)
from stages.evaluate import metrics
from stages.evaluate.checks import Judgement
from stages.evaluate.distance import StepStatistics
from stages.evaluate.rows import Answer, answers, make_rows, score
from stages.evaluate.scores import LogProbabilities
from stages.evaluate.system import measure_system
from stages.evaluate.tokens import EncodedSample, Tokenizer, encode, workloads_digest

LOGPROBS = "logprobs.safetensors"
ANSWERS = "answers.jsonl"
BASELINE = "baseline.json"
TOKENS = "tokens.safetensors"

OpenEngine = Callable[[], Engine]


class _Baseline(BaseModel):
    """The content of baseline.json."""

    workloads_digest: str
    vocab_size: int
    noise: NoiseFloor
    system: SystemMetrics


class _StoredAnswer(BaseModel):
    """A line of answers.jsonl."""

    id: str
    text: str
    valid: bool | None
    correct: bool


def _first_of_each_workload(encoded: Sequence[EncodedSample], count: int) -> list[int]:
    """Return the indices of the first `count` samples of every workload."""
    counts: dict[str, int] = {}
    indices = []
    for i, item in enumerate(encoded):
        counts[item.sample.workload] = counts.get(item.sample.workload, 0) + 1
        if counts[item.sample.workload] <= count:
            indices.append(i)
    return indices


def _labelled(progress: Progress, label: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(label, done, total)


def measure_baseline(
    open_engine: OpenEngine,
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    out: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress,
) -> None:
    """Run the baseline engine on `samples` and write what candidates are compared with.

    Args:
        open_engine: Loads the FP16-KV engine.
        samples: The samples, in the order of `load_samples`.
        tokenizer: The tokenizer of the engine bundle.
        out: An empty directory. It receives `logprobs.safetensors`, `answers.jsonl` and `baseline.json`.
        config: Batch size, limits and the load of the system metrics.
        progress: Called with a label, the tokens done, and the tokens in all.

    Raises:
        UserError: The baseline's logits are not finite, or a sample has too few tokens.
    """
    encoded = encode(samples, tokenizer, config.max_scored_tokens)
    engine = open_engine()
    tokens = {item.sample.id: len(item.reference) for item in encoded}
    store = LogProbabilities.create(out / LOGPROBS, tokens, engine.vocab_size)
    scored = _labelled(progress, "baseline: forced decode")
    statistics = score(engine, encoded, store, config.batch_size, scored, record=True)
    store.flush()
    for item, steps in zip(encoded, statistics, strict=True):
        if not np.isfinite(steps.baseline_nll).all():
            raise UserError(
                f"backend.compute_dtype: the baseline's logits are not finite on sample {item.sample.id}; use float32"
            )
    baseline_answers = answers(engine, encoded, statistics, tokenizer, config)
    stored = [
        _StoredAnswer(id=item.sample.id, text=a.text, valid=a.judgement.valid, correct=a.judgement.correct)
        for item, a in zip(encoded, baseline_answers, strict=True)
        if a is not None
    ]
    (out / ANSWERS).write_text("".join(answer.model_dump_json() + "\n" for answer in stored), encoding="utf-8")
    noise = _noise_floor(
        engine,
        encoded,
        baseline_answers=baseline_answers,
        store=store,
        tokenizer=tokenizer,
        config=config,
        progress=progress,
    )
    progress("baseline: system metrics", 0, 1)
    record = _Baseline(
        workloads_digest=workloads_digest(encoded),
        vocab_size=engine.vocab_size,
        noise=noise,
        system=measure_system(engine, config.load),
    )
    (out / BASELINE).write_text(record.model_dump_json(indent=1), encoding="utf-8")


def _noise_floor(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    *,
    baseline_answers: Sequence[Answer | None],
    store: LogProbabilities,
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
    noise_config = config.model_copy(update={"batch_size": 1 if config.batch_size > 1 else 2})
    scored = _labelled(progress, "baseline: noise floor")
    statistics = score(engine, subset, store, noise_config.batch_size, scored, one_pass=False)
    repeated = zip(indices, answers(engine, subset, statistics, tokenizer, noise_config), strict=True)
    flips = sum(a is not None and a.judgement != baseline_answers[i].judgement for i, a in repeated)  # type: ignore[union-attr]
    return NoiseFloor(samples=len(indices), fidelity=metrics.fidelity(StepStatistics.joined(statistics)), answer_flips=flips)


def evaluate_candidate(
    open_engine: OpenEngine,
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    baseline_dir: Path,
    out: Path,
    *,
    config: WorkloadsConfig,
    engine_digest: str,
    baseline_digest: str,
    progress: Progress,
    graph_digest: str | None = None,
) -> EvaluationReport:
    """Run a candidate engine on `samples`, compare it with the baseline and write the report.

    Args:
        open_engine: Loads the candidate. It is called twice, because the canary corrupts the engine that it runs on.
        samples: The samples that the baseline was measured on.
        tokenizer: The tokenizer of the engine bundle.
        baseline_dir: What `measure_baseline` wrote.
        out: An empty directory. It receives `report.json`, `samples.jsonl` and `tokens.safetensors`.
        config: Batch size, limits, context bins, the canary and the load of the system metrics.
        engine_digest: Digest of the candidate's bundle, cited in the report.
        baseline_digest: Digest of the baseline engine's bundle, cited in the report.
        progress: Called with a label, the tokens done, and the tokens in all.
        graph_digest: sha256 of the decode graph that the engine runs or its plan was built from, cited in the report; None
            for an engine without a graph.

    Returns:
        The report, as written to `report.json`.

    Raises:
        UserError: A sample has too few tokens.
        ValueError: The baseline was measured on other samples or has another vocabulary.
    """
    encoded = encode(samples, tokenizer, config.max_scored_tokens)
    digest = workloads_digest(encoded)
    baseline = _Baseline.model_validate_json((baseline_dir / BASELINE).read_text(encoding="utf-8"))
    engine = open_engine()
    if (baseline.workloads_digest, baseline.vocab_size) != (digest, engine.vocab_size):
        raise ValueError(f"{baseline_dir} was measured on other samples or another vocabulary: measure the baseline again")
    store = LogProbabilities(baseline_dir / LOGPROBS)
    baseline_answers = _stored_answers(baseline_dir, encoded)

    statistics = score(engine, encoded, store, config.batch_size, _labelled(progress, "forced decode"))
    candidate_answers = answers(engine, encoded, statistics, tokenizer, config)
    rows = make_rows(encoded, statistics, baseline_answers, candidate_answers)
    progress("system metrics", 0, 1)
    system = measure_system(engine, config.load)
    report = EvaluationReport(
        schema_version=SCHEMA_VERSION,
        policy=engine.policy.name,
        engine_digest=engine_digest,
        graph_digest=graph_digest,
        baseline_digest=baseline_digest,
        workloads_digest=digest,
        samples=len(rows),
        slices=metrics.slices(rows, statistics, config.context_bins),
        kl_slope=metrics.slope(rows),
        noise=baseline.noise,
        canary=_canary(open_engine(), encoded, store, config, progress),
        system=system,
        baseline_system=baseline.system,
    )
    _save_tokens(out / TOKENS, StepStatistics.joined(statistics))
    (out / SAMPLES_FILE).write_text("".join(row.model_dump_json() + "\n" for row in rows), encoding="utf-8")
    (out / REPORT_FILE).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return report


def _canary(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    store: LogProbabilities,
    config: WorkloadsConfig,
    progress: Progress,
) -> Canary:
    """Run forced decode that reads wrong keys: prefill some samples together, corrupt the key scale once, then decode."""
    # The longest prompts are taken: a short prompt may consist of exact sink and recent tokens, and then reads no scale.
    count = len(_first_of_each_workload(encoded, config.canary_samples))
    subset = sorted(encoded, key=lambda item: -len(item.prompt))[:count]
    statistics = score(
        engine,
        subset,
        store,
        len(subset),  # one batch: there is one prefill, and the corruption comes after it
        _labelled(progress, "canary"),
        after_prefill=lambda: engine.corrupt_key_scale(config.canary_factor),
    )
    no_answers = [None] * len(subset)
    return Canary(factor=config.canary_factor, rows=make_rows(subset, statistics, no_answers, no_answers))


def _stored_answers(directory: Path, encoded: Sequence[EncodedSample]) -> list[Answer | None]:
    """Return the baseline's answer to each sample, None for a sample that is not judged."""
    stored = [_StoredAnswer.model_validate_json(line) for line in jsonl_lines(directory / ANSWERS)]
    by_id = {a.id: Answer(a.text, Judgement(valid=a.valid, correct=a.correct)) for a in stored}
    return [by_id.get(item.sample.id) for item in encoded]


def _save_tokens(path: Path, steps: StepStatistics) -> None:
    from safetensors.numpy import save_file

    arrays = {item.name: np.ascontiguousarray(getattr(steps, item.name)) for item in fields(steps)}
    save_file({name: a if a.dtype == np.int64 else a.astype(np.float32) for name, a in arrays.items()}, str(path))
