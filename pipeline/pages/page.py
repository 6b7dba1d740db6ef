"""The page of a candidate's run, put together from its report."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.pages.description import description
from pipeline.pages.metrics import chosen
from pipeline.pages.tables import tables
from pipeline.registry.contents import RunPage, Workload
from pipeline.registry.summary import Candidate
from pipeline.verdict.report import EvaluationReport, SampleRow


def run_page(
    candidate: Candidate, report: EvaluationReport, rows: Sequence[SampleRow], *, sweep: str, model: str, workdir: Path
) -> RunPage:
    """Return what the run of a candidate shows, besides the files that it cites.

    Args:
        candidate: The candidate, judged.
        report: Its report.
        rows: The report's samples.
        sweep: Identifier of its sweep.
        model: The checkpoint, as the configuration names it.
        workdir: The work directory.
    """
    return RunPage(
        metrics=chosen(candidate),
        description=description(candidate, sweep, model, workdir),
        tables=tables(candidate, report, rows),
        workloads=_workloads(report),
    )


def _workloads(report: EvaluationReport) -> list[Workload]:
    return [
        Workload(part.workload, report.workloads_digest, part.samples, part.documents, part.fidelity.tokens)
        for part in report.slices
        if part.whole and part.workload is not None
    ]
