"""Joins the measurements of a candidate and its baseline into the report. Pure functions that take milliseconds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from stages.evaluate.decoding.rows import make_row
from stages.evaluate.decoding.stored import MeasuredOnce, Round
from stages.evaluate.distances.distance import Array, StepStatistics
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.conformance import Conformance
from stages.verdict.coverage import Exercised
from stages.verdict.record import finite
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE, Acceptance, Accuracy, EvaluationReport, Fidelity, SampleRow, Slice
from stages.workloads.config import WorkloadsConfig


@dataclass(frozen=True)
class JoinedEvaluation:
    """A report and the data that it is computed from."""

    report: EvaluationReport
    rows: list[SampleRow]

    def write(self, out: Path) -> None:
        """Write `report.json` and `samples.jsonl` into an empty directory."""
        (out / SAMPLES_FILE).write_text("".join(row.model_dump_json() + "\n" for row in self.rows), encoding="utf-8")
        (out / REPORT_FILE).write_text(self.report.model_dump_json(indent=1) + "\n", encoding="utf-8")


def join(
    encoded: Sequence[EncodedSample],
    rounds: Sequence[tuple[Round, Round]],
    once: tuple[MeasuredOnce, MeasuredOnce],
    config: WorkloadsConfig,
    *,
    engine: str,
    baseline: str,
    samples: str,
) -> JoinedEvaluation:
    """Join the rounds that ran into the report.

    Args:
        encoded: All samples of the evaluation, including samples of rounds that did not run.
        rounds: (baseline, candidate) by round that ran, from the first.
        once: The measurements made only once, (baseline, candidate).
        engine: Digest of the candidate's bundle, which the report cites.
        baseline: Digest of the baseline's bundle.
        samples: `workloads_digest` of `encoded`.
    """
    rows, parts = list[SampleRow](), list[StepStatistics]()
    for number, (before, after) in enumerate(rounds, start=1):
        for item in before.scored([item for item in encoded if item.round == number]):
            name = item.sample.id
            parts.append(after.statistics[name])
            rows.append(make_row(item, parts[-1], before.answers.get(name), after.answers.get(name)))
    base, own = once
    first_base, first = rounds[0]
    conformance = None
    if first.conformance is not None and first_base.conformance is not None:
        conformance = Conformance(rounding=first.rounding, baseline=first_base.conformance, candidate=first.conformance)
    planned: dict[str, bool] = {}
    for item in encoded:
        planned[item.sample.workload] = planned.get(item.sample.workload, False) or item.judged
    assert own.control is not None, "a candidate has a must-fail control"
    report = EvaluationReport(
        policy=first.policy,
        takes_effect=first.takes_effect,
        engine_digest=engine,
        baseline_digest=baseline,
        workloads_digest=samples,
        samples=len(rows),
        planned_rounds=max(item.round for item in encoded),
        planned_workloads=planned,
        slices=slices(rows, parts, config.context_bins),
        noise=base.noise,
        control=own.control,
        system=own.system,
        baseline_system=base.system,
        conformance=conformance,
        candidate_noise=own.noise,
        coverage=Exercised.merged([*(after.coverage for _, after in rounds), own.coverage]),
        tests=own.tests,
        baseline_tests=base.tests,
        scale_changes=first.scale_changes,
        drafters=config.speculation.drafters if config.speculation is not None else [],
    )
    return JoinedEvaluation(report, rows)


SliceKey = tuple[str | None, tuple[int, int | None] | None]
"""(workload, context bin) of a slice; None means all."""


def context_bin(tokens: int, edges: Sequence[int]) -> tuple[int, int | None]:
    """Return the bin [low, high) that contains `tokens`; the last bin has no upper end.

    Args:
        edges: Lower ends of the bins in tokens, ascending.
    """
    position = max(0, int(np.searchsorted(edges, tokens, side="right")) - 1)
    return edges[position], edges[position + 1] if position + 1 < len(edges) else None


def _exp(value: float) -> float | None:
    return math.exp(value) if value < 700 else None  # NaN compares false


def fidelity(steps: StepStatistics) -> Fidelity:
    """Summarize the statistics of tokens.

    A NaN makes the summaries of its column null, because no token may be left out of a mean or a percentile.
    """

    def mean(values: Array) -> float:
        return float(values.mean())

    baseline_nll, candidate_nll = mean(steps.baseline_nll), mean(steps.candidate_nll)
    p999, largest = (finite(value) for value in np.percentile(steps.kl, [99.9, 100]).tolist())
    return Fidelity(
        tokens=len(steps.kl),
        baseline_nll=finite(baseline_nll),
        candidate_nll=finite(candidate_nll),
        ppl_ratio=_exp(candidate_nll - baseline_nll),
        kl_mean=finite(mean(steps.kl)),
        kl_p999=p999,
        kl_max=largest,
        top1_agreement=finite(mean(steps.top1)),
        top10_overlap=finite(mean(steps.top10)),
        rms_delta_p=finite(math.sqrt(mean(steps.delta_p**2))),
        non_finite_steps=int((~np.isfinite(steps.kl)).sum()),
    )


def acceptance(rows: Sequence[SampleRow]) -> dict[str, Acceptance]:
    """Sum the tokens and passes of all answers, by drafter."""
    parts: dict[str, list[Acceptance]] = {}
    for row in rows:
        for drafter, counts in row.acceptance.items():
            parts.setdefault(drafter, []).append(counts)
    return {
        drafter: Acceptance(**{name: sum(getattr(part, name) for part in counts) for name in Acceptance.model_fields})
        for drafter, counts in parts.items()
    }


def slices(rows: Sequence[SampleRow], statistics: Sequence[StepStatistics], edges: Sequence[int]) -> list[Slice]:
    """Summarize all rows together, by workload, by context bin, and by workload and context bin.

    Args:
        edges: Lower ends of the context bins in tokens.

    Returns:
        The slices that have samples, sorted by workload and context.
    """
    members: dict[SliceKey, list[int]] = {}
    for i, row in enumerate(rows):
        for key in product((None, row.workload), (None, context_bin(row.context_tokens, edges))):
            members.setdefault(key, []).append(i)

    def order(key: SliceKey) -> tuple[str, int]:
        return key[0] or "", -1 if key[1] is None else key[1][0]

    summaries = []
    for key in sorted(members, key=order):
        slice_rows = [rows[i] for i in members[key]]
        judged = [row for row in slice_rows if row.judged]
        steps = StepStatistics.joined([statistics[i] for i in members[key]])
        summaries.append(
            Slice(
                workload=key[0],
                context=key[1],
                samples=len(slice_rows),
                accuracy=Accuracy.of(judged) if judged else None,
                fidelity=fidelity(steps),
                acceptance=acceptance(slice_rows),
            )
        )
    return summaries
