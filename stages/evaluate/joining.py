"""Joins the measurements of a candidate and its baseline into the report. Pure functions that take milliseconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.evaluate.decoding.rows import make_row
from stages.evaluate.decoding.stored import MeasuredOnce, Round
from stages.evaluate.distances import metrics
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.conformance import Conformance
from stages.verdict.coverage import Exercised
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE, EvaluationReport, SampleRow
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
        config: Configuration with context bins.
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
        conformance = Conformance(
            compute_dtype=first.compute_dtype, baseline=first_base.conformance, candidate=first.conformance
        )
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
        slices=metrics.slices(rows, parts, config.context_bins),
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
    )
    return JoinedEvaluation(report, rows)
