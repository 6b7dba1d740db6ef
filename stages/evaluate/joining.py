"""Joins the rounds of a candidate into its report, the samples side by side, and the statistics of every scored token."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from safetensors.numpy import save_file

from pipeline.core.records import Sample
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.conformance import Conformance
from pipeline.verdict.coverage import Coverage, EngineProbes
from pipeline.verdict.delivery import Served, ServerSeen
from pipeline.verdict.report import REPORT_FILE, SAMPLES_FILE, SCHEMA_VERSION, EvaluationReport, Work
from stages.evaluate.decoding.rows import Answer, make_rows
from stages.evaluate.decoding.stored import (
    BaselineRound,
    CandidateRound,
    arrays,
    read_answers,
    read_baseline,
    read_candidate,
    read_statistics,
)
from stages.evaluate.distances import metrics
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.inputs.tokens import EncodedSample, Tokenizer, encode, workloads_digest
from stages.evaluate.rounds import assign_rounds, planned_shares

TOKENS = "tokens.safetensors"

T = TypeVar("T")


@dataclass(frozen=True)
class MeasuredRound:
    """The directories of a round that ran."""

    baseline: Path
    candidate: Path


def join_rounds(
    measured: Sequence[MeasuredRound],
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    out: Path,
    *,
    config: WorkloadsConfig,
    engine_digest: str,
    baseline_digest: str,
    graph_digest: str | None = None,
) -> EvaluationReport:
    """Join the rounds that ran, from the first on, into the report.

    Args:
        measured: The rounds, in order.
        samples: All samples of the evaluation, those of rounds that did not run included.
        tokenizer: The tokenizer of the engine bundle.
        out: An empty directory. It receives `report.json`, `samples.jsonl` and `tokens.safetensors`: the statistics of every
            scored token, in the order of `samples.jsonl`, `scored_tokens` of them for each of its rows.
        config: Rounds, limits and context bins.
        engine_digest: Digest of the candidate's bundle, cited in the report.
        baseline_digest: Digest of the baseline engine's bundle, cited in the report.
        graph_digest: sha256 of the decode graph that the engine runs or its plan was built from, cited in the report; None
            for an engine without a graph.

    Returns:
        The report, as written to `report.json`.

    Raises:
        ValueError: A round was measured on other samples.
    """
    encoded: list[EncodedSample] = []
    numbers: list[int] = []
    before: list[Answer | None] = []
    after: list[Answer | None] = []
    parts: list[StepStatistics] = []
    records: list[CandidateRound] = []
    rounds = assign_rounds(samples, config.rounds)
    for number, (chosen, directories) in enumerate(zip(rounds, measured, strict=False), start=1):
        items = encode(chosen, tokenizer, config.max_scored_tokens)
        record = read_candidate(directories.candidate)
        if record.samples_digest != workloads_digest(items):
            raise ValueError(f"{directories.candidate} was measured on other samples than those of round {number}")
        records.append(record)
        encoded += items
        numbers += [number] * len(items)
        before += read_answers(directories.baseline, items)
        after += read_answers(directories.candidate, items)
        parts += read_statistics(directories.candidate, items)
    baselines = [read_baseline(directories.baseline) for directories in measured[: len(records)]]
    coverages = [record.coverage for record in records]
    first, first_baseline = records[0], baselines[0]
    canary, system = _present(first.canary), _present(first.system)
    conformance = None
    if first.conformance is not None and first_baseline.conformance is not None:
        conformance = Conformance(
            compute_dtype=first.compute_dtype, baseline=first_baseline.conformance, candidate=first.conformance
        )
    noise, baseline_system = _present(first_baseline.noise), _present(first_baseline.system)
    probes = EngineProbes(
        candidate=first.probe,
        baseline=first_baseline.probe,
        free_candidate=_present(first.free_answers),
        free_baseline=_present(first_baseline.free_answers),
        reused_candidate=first.reused,
        reused_baseline=first_baseline.reused,
    )
    rows = make_rows(encoded, parts, before, after, numbers)
    report = EvaluationReport(
        schema_version=SCHEMA_VERSION,
        policy=first.policy,
        engine_digest=engine_digest,
        graph_digest=graph_digest,
        baseline_digest=baseline_digest,
        workloads_digest=workloads_digest(encode(samples, tokenizer, config.max_scored_tokens)),
        samples=len(rows),
        planned_rounds=planned_shares(rounds),
        planned_workloads=_planned_workloads(samples),
        slices=metrics.slices(rows, parts, config.context_bins),
        kl_slope=metrics.slope(rows),
        noise=noise,
        canary=canary,
        system=system,
        baseline_system=baseline_system,
        compaction=metrics.compaction([pair for record in records for pair in record.checks]),
        work=_total([record.work for record in records]),
        conformance=conformance,
        candidate_noise=first.noise,
        coverage=None if None in coverages else Coverage.merged([part for part in coverages if part is not None]),
        probes=probes,
        scale_changes=first.scale_changes,
        served=_served(records, baselines),
        drafters=config.speculation.drafters if config.speculation is not None else [],
    )
    statistics = arrays(StepStatistics.joined(parts))
    save_file({name: a if a.dtype == np.int64 else a.astype(np.float32) for name, a in statistics.items()}, str(out / TOKENS))
    (out / SAMPLES_FILE).write_text("".join(row.model_dump_json() + "\n" for row in rows), encoding="utf-8")
    (out / REPORT_FILE).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return report


def _planned_workloads(samples: Sequence[Sample]) -> dict[str, bool]:
    answered: dict[str, bool] = {}
    for sample in samples:
        answered[sample.workload] = answered.get(sample.workload, False) or sample.check != "none"
    return answered


def _served(candidates: Sequence[CandidateRound], baselines: Sequence[BaselineRound]) -> Served | None:
    """Return what was seen of servers in all rounds; None for engines that run here."""
    first = candidates[0]
    if first.served is None or first.top_logprobs is None:
        return None
    candidate, baseline = (
        ServerSeen.merged([record.served for record in records if record.served is not None])
        for records in (candidates, baselines)
    )
    return Served(candidate=candidate, baseline=baseline, top_logprobs=first.top_logprobs, canary_url=first.canary_url)


def _present(measured: T | None) -> T:
    assert measured is not None, "the first round has all that a report wants"
    return measured


def _total(parts: Sequence[Work]) -> Work:
    return Work(**{name: sum(getattr(part, name) for part in parts) for name in Work.model_fields})
