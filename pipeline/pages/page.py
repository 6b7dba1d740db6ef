"""The page of a candidate's run, put together from its report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.pages.description import description
from pipeline.pages.metrics import chosen
from pipeline.registry.contents import RunPage, Workload
from pipeline.registry.summary import Candidate
from pipeline.verdict.report import EvaluationReport, SampleRow

OUTCOMES = {
    (True, False): "lost",
    (False, True): "gained",
    (False, False): "wrong in both",
    (True, True): "right in both",
    (None, None): "not judged",
}
"""(baseline right, candidate right) -> outcome; the table begins with what was lost."""
SHOWN = (
    "workload",
    "context_tokens",
    "reference",
    "baseline_generation",
    "candidate_generation",
    "mean_kl",
    "max_kl",
    "baseline_probability",
    "candidate_probability",
    "top10_overlap",
    "top1_agreement",
    "baseline_nll",
    "candidate_nll",
    "depth",
    "difficulty",
    "scored_tokens",
    "round",
    "document",
    "id",
)
"""Columns of the samples after the outcome: what was said stands before what was measured."""


def run_page(
    candidate: Candidate, report: EvaluationReport, rows: Sequence[SampleRow], *, sweep: str, model: str, workdir: Path
) -> RunPage:
    """Return what the run of a candidate shows, besides report.json and report.html."""
    return RunPage(
        metrics=chosen(candidate),
        description=description(candidate, sweep, model, workdir),
        tables={"samples.json": _samples(rows), "checks.json": [check.model_dump() for check in candidate.checks]},
        workloads=[
            Workload(part.workload, report.workloads_digest, part.samples, part.documents, part.fidelity.tokens)
            for part in report.slices
            if part.whole and part.workload is not None
        ],
    )


def _samples(rows: Sequence[SampleRow]) -> list[dict[str, Any]]:
    """Return the samples, lost answers first, those farthest from the baseline first; without a finite KL is farthest."""

    def outcome(row: SampleRow) -> str:
        return OUTCOMES[row.baseline_correct, row.candidate_correct]

    def order(row: SampleRow) -> tuple[int, bool, float]:
        return list(OUTCOMES.values()).index(outcome(row)), row.mean_kl is not None, -(row.mean_kl or 0.0)

    return [{"answer": outcome(row), **{name: getattr(row, name) for name in SHOWN}} for row in sorted(rows, key=order)]
