"""The tables of a candidate's run: samples, parts of the report, lines of the verdict, all numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.pages.metrics import with_losses
from pipeline.registry.summary import Candidate
from pipeline.verdict.report import EvaluationReport, SampleRow, Slice
from pipeline.verdict.thresholds import Check

Rows = list[dict[str, Any]]

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


def tables(candidate: Candidate, report: EvaluationReport, rows: Sequence[SampleRow]) -> dict[str, Rows]:
    """Return the tables by the names of their files."""
    return {
        "samples.json": _samples(rows),
        "slices.json": [_slice(part) for part in report.slices],
        "checks.json": _checks(candidate.checks),
        "metrics.json": [{"metric": name, "value": value} for name, value in with_losses(candidate.metrics).items()],
    }


def _samples(rows: Sequence[SampleRow]) -> Rows:
    """Return the samples, lost answers first, those farthest from the baseline first; without a finite KL is farthest."""

    def outcome(row: SampleRow) -> str:
        return OUTCOMES[row.baseline_correct, row.candidate_correct]

    def order(row: SampleRow) -> tuple[int, bool, float]:
        return list(OUTCOMES.values()).index(outcome(row)), row.mean_kl is not None, -(row.mean_kl or 0.0)

    return [{"answer": outcome(row), **{name: getattr(row, name) for name in SHOWN}} for row in sorted(rows, key=order)]


def _slice(part: Slice) -> dict[str, Any]:
    """Return one part of the report, of everything, a workload, a context bin, a third of the depth or a difficulty."""
    low, high = part.context or (None, None)
    accuracy = part.accuracy
    answers: Mapping[str, Any] = {} if accuracy is None else accuracy.model_dump()
    loss = None if accuracy is None else accuracy.baseline - accuracy.candidate
    return {
        "workload": part.workload or "all",
        "context_from": low,
        "context_below": high,
        "depth": part.depth,
        "difficulty": part.difficulty,
        "samples": part.samples,
        "documents": part.documents,
        "accuracy_loss": loss,
        **{f"accuracy_{name}": value for name, value in answers.items()},
        **part.fidelity.model_dump(exclude={"divergence"}),
        **part.acceptance_lengths,
    }


def _checks(checks: Sequence[Check]) -> Rows:
    """Return the lines of the verdict in its own order."""
    return [check.model_dump() for check in checks]
