"""Joins the measurements of a candidate and its baseline into the report. Runs no engine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from stages.core.records import finite
from stages.evaluate.decoding.stored import JudgedAnswer, Round, probability
from stages.evaluate.distances.distance import StepStatistics, TokenStatistics, join_statistics
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.conformance import Conformance
from stages.verdict.coverage import Exercised
from stages.verdict.report import (
    REPORT_FILE,
    SAMPLES_FILE,
    Acceptance,
    Accuracy,
    EngineTests,
    EvaluationReport,
    Fidelity,
    SampleRow,
    Slice,
)
from stages.verdict.verdict import FAR_KL
from stages.workloads.config import WorkloadsConfig


@dataclass(frozen=True)
class JoinedEvaluation:
    report: EvaluationReport
    rows: list[SampleRow]

    def write(self, out: Path) -> None:
        (out / SAMPLES_FILE).write_text("".join(row.model_dump_json() + "\n" for row in self.rows), encoding="utf-8")
        (out / REPORT_FILE).write_text(self.report.model_dump_json(indent=1) + "\n", encoding="utf-8")


def join(
    encoded: Sequence[EncodedSample],
    rounds: Sequence[tuple[Round, Round]],
    tests: tuple[EngineTests, EngineTests],
    config: WorkloadsConfig,
    *,
    engine: str,
    baseline: str,
    samples: str,
) -> JoinedEvaluation:
    """Build the report from the `rounds` that were run and the `tests`, each (baseline, candidate).

    `encoded` includes the samples of rounds that did not run. `engine` and `baseline` are digests of the bundles, and `samples`
    is the `workloads_digest` of `encoded`.
    """
    rows, parts = list[SampleRow](), list[StepStatistics]()
    for number, (baseline_round, candidate_round) in enumerate(rounds, start=1):
        for item in baseline_round.scored([item for item in encoded if item.round == number]):
            name = item.sample.id
            parts.append(candidate_round.statistics[name])
            rows.append(make_row(item, parts[-1], baseline_round.answers.get(name), candidate_round.answers.get(name)))
    baseline_tests, candidate_tests = tests
    first_base, first = rounds[0]
    conformance = None
    if first.conformance is not None and first_base.conformance is not None:
        conformance = Conformance(rounding=first.rounding, baseline=first_base.conformance, candidate=first.conformance)
    planned: dict[str, bool] = {}
    for item in encoded:
        planned[item.sample.workload] = planned.get(item.sample.workload, False) or item.sample.judged
    report = EvaluationReport(
        policy=first.policy,
        takes_effect=first.takes_effect,
        engine_digest=engine,
        baseline_digest=baseline,
        workloads_digest=samples,
        samples=len(rows),
        planned_rounds=max(item.round for item in encoded),
        planned_workloads=planned,
        planned_bins=planned_bins(encoded, config.context_bins),
        slices=slices(rows, parts, config.context_bins),
        conformance=conformance,
        coverage=Exercised.merged([*(candidate_round.coverage for _, candidate_round in rounds), candidate_tests.coverage]),
        tests=candidate_tests,
        baseline_tests=baseline_tests,
        scale_changes=first.scale_changes,
        drafters=config.speculation.drafters if config.speculation is not None else [],
    )
    return JoinedEvaluation(report, rows)


def _acceptance(baseline: JudgedAnswer, candidate: JudgedAnswer) -> dict[str, Acceptance]:
    return {
        name: Acceptance(
            baseline_tokens=baseline.passes[name][0],
            baseline_passes=baseline.passes[name][1],
            candidate_tokens=tokens,
            candidate_passes=passes,
        )
        for name, (tokens, passes) in candidate.passes.items()
        if name in baseline.passes
    }


def make_row(
    item: EncodedSample, steps: StepStatistics, baseline: JudgedAnswer | None, candidate: JudgedAnswer | None
) -> SampleRow:
    """Build the row of a sample. The answers are None if the sample is not judged, or if none were generated."""
    sample, summary = item.sample, fidelity(steps)
    return SampleRow(
        id=sample.id,
        workload=sample.workload,
        document=sample.cluster,
        context_tokens=len(item.prompt),
        scored_tokens=len(item.reference),
        judged=candidate is not None,
        baseline_correct=baseline.correct if baseline else None,
        candidate_correct=candidate.correct if candidate else None,
        reference=sample.reference if candidate else None,
        baseline_generation=baseline.text if baseline else None,
        candidate_generation=candidate.text if candidate else None,
        mean_kl=summary.kl_mean,
        max_kl=summary.kl_max,
        far_tokens=int((steps.kl > FAR_KL).sum()),
        baseline_nll=summary.baseline_nll,
        candidate_nll=summary.candidate_nll,
        top1_agreement=summary.top1_agreement,
        top10_overlap=summary.top10_overlap,
        non_finite_steps=summary.non_finite_steps,
        difficulty=sample.difficulty,
        round=item.round,
        acceptance=_acceptance(baseline, candidate) if baseline and candidate else {},
        baseline_probability=finite(probability(steps.baseline_nll, item)) if item.sample.judged else None,
        candidate_probability=finite(probability(steps.candidate_nll, item)) if item.sample.judged else None,
        right_answer="baseline" if item.replaced else "reference",
    )


SliceKey = tuple[str | None, tuple[int, int | None] | None]
"""(workload, context bin) of a slice; None means all."""


def context_bin(tokens: int, edges: Sequence[int]) -> tuple[int, int | None]:
    """Return the bin [low, high) that contains `tokens`, given the bins' lower ends; the last bin has no upper end."""
    position = max(0, int(np.searchsorted(edges, tokens, side="right")) - 1)
    return edges[position], edges[position + 1] if position + 1 < len(edges) else None


def planned_bins(encoded: Sequence[EncodedSample], edges: Sequence[int]) -> int:
    """Return the number of context bins that samples with answers fill, over all workloads that fill more than one."""
    filled: dict[str, set[tuple[int, int | None]]] = {}
    for item in encoded:
        if item.sample.judged:
            filled.setdefault(item.sample.workload, set()).add(context_bin(len(item.prompt), edges))
    return sum(len(bins) for bins in filled.values() if len(bins) > 1)


def _exp(value: float) -> float | None:
    return math.exp(value) if value < 700 else None  # NaN compares false


def fidelity(steps: StepStatistics) -> Fidelity:
    """Summarize the statistics of tokens. A NaN makes the summaries of its field null, because every token must count."""
    mean = TokenStatistics(*(float(values.mean()) for values in steps))
    p999, largest = (finite(value) for value in np.percentile(steps.kl, [99.9, 100]).tolist())
    return Fidelity(
        tokens=len(steps.kl),
        baseline_nll=finite(mean.baseline_nll),
        candidate_nll=finite(mean.candidate_nll),
        ppl_ratio=_exp(mean.candidate_nll - mean.baseline_nll),
        kl_mean=finite(mean.kl),
        kl_p999=p999,
        kl_max=largest,
        top1_agreement=finite(mean.top1),
        top10_overlap=finite(mean.top10),
        non_finite_steps=int((~np.isfinite(steps.kl)).sum()),
    )


def acceptance(rows: Sequence[SampleRow]) -> dict[str, Acceptance]:
    parts: dict[str, list[Acceptance]] = {}
    for row in rows:
        for drafter, counts in row.acceptance.items():
            parts.setdefault(drafter, []).append(counts)
    return {
        drafter: Acceptance(**{name: sum(getattr(part, name) for part in counts) for name in Acceptance.model_fields})
        for drafter, counts in parts.items()
    }


def slices(rows: Sequence[SampleRow], statistics: Sequence[StepStatistics], edges: Sequence[int]) -> list[Slice]:
    """Summarize all rows together, by workload, by context bin, and by workload and context bin; sorted, without empty slices.

    `edges`: lower ends of the context bins in tokens.
    """
    members: dict[SliceKey, list[int]] = {}
    for i, row in enumerate(rows):
        for key in product((None, row.workload), (None, context_bin(row.context_tokens, edges))):
            members.setdefault(key, []).append(i)

    def order(key: SliceKey) -> tuple[str, int]:
        return key[0] or "", -1 if key[1] is None else key[1][0]

    def summary(key: SliceKey) -> Slice:
        inside = [rows[i] for i in members[key]]
        judged = [row for row in inside if row.judged]
        return Slice(
            workload=key[0],
            context=key[1],
            samples=len(inside),
            accuracy=Accuracy.from_rows(judged) if judged else None,
            fidelity=fidelity(join_statistics([statistics[i] for i in members[key]])),
            acceptance=acceptance(inside),
        )

    return [summary(key) for key in sorted(members, key=order)]
