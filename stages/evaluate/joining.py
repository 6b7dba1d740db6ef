"""Joins the measurements of a candidate and its baseline into the report. Pure functions that take milliseconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from stages.evaluate.decoding.rows import make_rows
from stages.evaluate.decoding.stored import MeasuredOnce, Round
from stages.evaluate.distances import metrics
from stages.evaluate.distances.distance import Array
from stages.evaluate.inputs.rounds import planned_shares
from stages.evaluate.inputs.tokens import Encoded
from stages.verdict.conformance import Conformance
from stages.verdict.coverage import Exercised
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE, SCHEMA_VERSION, EvaluationReport, SampleRow
from stages.workloads.config import WorkloadsConfig

TOKENS = "tokens.safetensors"


@dataclass(frozen=True)
class JoinedEvaluation:
    """A report and the data that it is computed from."""

    report: EvaluationReport
    rows: list[SampleRow]
    kl: Array
    """KL by scored token in nats, concatenated in the order of the rows (`scored_tokens` values per row)."""

    def write(self, out: Path) -> None:
        """Write `report.json`, `samples.jsonl` and `tokens.safetensors` into an empty directory."""
        save_file({"kl": self.kl.astype(np.float32)}, str(out / TOKENS))
        (out / SAMPLES_FILE).write_text("".join(row.model_dump_json() + "\n" for row in self.rows), encoding="utf-8")
        (out / REPORT_FILE).write_text(self.report.model_dump_json(indent=1) + "\n", encoding="utf-8")


def join(
    encoded: Encoded,
    rounds: Sequence[tuple[Round, Round]],
    once: tuple[MeasuredOnce, MeasuredOnce],
    config: WorkloadsConfig,
    *,
    engine: str,
    baseline: str,
) -> JoinedEvaluation:
    """Join the rounds that ran into the report.

    Args:
        encoded: All samples of the evaluation, including samples of rounds that did not run.
        rounds: (baseline, candidate) by round that ran, from the first.
        once: The measurements made only once, (baseline, candidate).
        config: Configuration with context bins and drafters.
        engine: Digest of the candidate's bundle, which the report cites.
        baseline: Digest of the baseline's bundle.
    """
    asked = [base.scored(encoded.round(number)) for number, (base, _) in enumerate(rounds, start=1)]
    columns = [list(zip(asked, part, strict=True)) for part in zip(*rounds, strict=True)]
    (before, after) = ([answer for items, one in part for answer in one.answers_to(items)] for part in columns)
    parts = [steps for items, candidate in columns[1] for steps in candidate.statistics_of(items)]
    numbers = [number for number, items in enumerate(asked, start=1) for _ in items]
    rows = make_rows(list(chain(*asked)), parts, before, after, numbers)
    bases, records = ([one.record for one in part] for part in zip(*rounds, strict=True))
    base, own = once
    first, first_base = records[0], bases[0]
    conformance = None
    if first.conformance is not None and first_base.conformance is not None:
        conformance = Conformance(
            compute_dtype=first.compute_dtype, baseline=first_base.conformance, candidate=first.conformance
        )
    assert own.control is not None, "a candidate has a must-fail control"
    report = EvaluationReport(
        schema_version=SCHEMA_VERSION,
        policy=first.policy,
        takes_effect=first.takes_effect,
        engine_digest=engine,
        baseline_digest=baseline,
        workloads_digest=encoded.digest,
        samples=len(rows),
        planned_rounds=planned_shares(encoded.numbers),
        planned_workloads=_planned_workloads(encoded),
        slices=metrics.slices(rows, parts, config.context_bins),
        noise=base.noise,
        control=own.control,
        system=own.system,
        baseline_system=base.system,
        conformance=conformance,
        candidate_noise=own.noise,
        coverage=Exercised.merged([*(record.coverage for record in records), own.coverage]),
        tests=own.tests,
        baseline_tests=base.tests,
        scale_changes=first.scale_changes,
        drafters=config.speculation.drafters if config.speculation is not None else [],
    )
    return JoinedEvaluation(report, rows, np.concatenate([steps.kl for steps in parts]))


def _planned_workloads(encoded: Encoded) -> dict[str, bool]:
    answered: dict[str, bool] = {}
    for item in encoded.items:
        answered[item.sample.workload] = answered.get(item.sample.workload, False) or item.judged
    return answered
