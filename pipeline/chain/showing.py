"""Output for people: report.html, and the comparison in MLflow. Neither decides anything."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pipeline import __version__
from pipeline.chain.job import open_store
from pipeline.cli import console
from pipeline.cli.tables import comparison, print_comparison
from pipeline.config.config import Config
from pipeline.evidence.reading import read_evidence
from pipeline.evidence.verify import requested_workloads
from pipeline.registry.promotion import PromotionMove
from pipeline.registry.summary import FOLDER, Summary
from pipeline.registry.tracking import compare_url, server_command
from stages.core.errors import Refusal, UserError, required_libraries
from stages.core.files import write_atomically
from stages.core.records import Sample
from stages.core.redaction import redact_text
from stages.verdict.candidate import Candidate

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore
    from stages.report.exhibit import Exhibit

PAGE = "report.html"
"""File in the work directory that shows the last evaluation, sweep or promotion."""


@contextmanager
def warn_on_error(what: str) -> Iterator[None]:
    """Turn an exception of the block into a warning, because the block decides nothing."""
    try:
        yield
    except Exception as error:
        detail = redact_text(str(error)).splitlines()[0] if str(error) else type(error).__name__
        console.warning(f"{what}: {detail}")


def _store_of(config: Config, candidates: Sequence[Candidate]) -> "MlflowStore | None":
    """Return the tracking store with the candidates' runs, or None if no candidate was registered."""
    tracked = any(candidate.version for candidate in candidates)
    return open_store(config.tracking, config.work, candidates[0].model) if tracked else None


def show_results(config: Config, candidates: Sequence[Candidate], last: Summary, *, began: bool, compares: bool) -> None:
    """Show the report of judged candidates. With `compares`, also a table, and their runs in MLflow.

    If there is a champion, the promotion has shown the report already. If there is no candidate although a job began to judge
    (`began`), PAGE is an earlier command's and is removed; a failure must not replace the command's own error.
    """
    compares = compares and bool(candidates)
    if compares:
        print_comparison(candidates)
    if last.champion is None and candidates:
        show_page(config, candidates, last, unfinished=last.unfinished)
    elif last.champion is None and began and (config.work / PAGE).exists():
        with warn_on_error(f"no verdict: {PAGE} is an earlier command's, and cannot be removed"):
            (config.work / PAGE).unlink()
            console.say(f"no verdict: {PAGE} was an earlier command's; {FOLDER}/ has the pages of all sweeps")
    if compares:
        compare_in_mlflow(config, candidates, last.sweep)


def show_page(
    config: Config,
    candidates: Sequence[Candidate],
    last: Summary,
    *,
    unfinished: str | None = None,
    move: PromotionMove | None = None,
) -> None:
    """Write the page about candidates, with a copy in the folder of summaries, and attach it to their runs.

    The page decides nothing, so a failure is only a warning. `unfinished` says which part of the sweep is missing. After a
    promotion, `move` has the new champion.
    """
    with warn_on_error(f"{PAGE} is not complete"), required_libraries(), TemporaryDirectory() as scratch:
        from stages.report.exhibit import Occasion
        from stages.report.page import write_page

        overview = comparison(candidates).texts()
        about = Occasion(
            config.model.label,
            config.work,
            last.sweep,
            __version__,
            overview,
            command=last.command,
            unfinished=unfinished,
            champion=None if move is None else move.champion,
            message="" if move is None else move.message,
            passed_over={} if move is None else move.passed_over,
        )
        exhibits = [_exhibit(candidate) for candidate in candidates]
        page = write_page(config.work / PAGE, exhibits, about)
        console.say(f"\nreport: {page!s}", paste=True)
        write_atomically(config.work / FOLDER / f"{last.sweep}.html", page.read_text(encoding="utf-8"))
        store = _store_of(config, candidates)
        if store is None:
            return
        if any(exhibit.private for exhibit in exhibits):
            public = [replace(exhibit, samples=()) if exhibit.private else exhibit for exhibit in exhibits]
            page = write_page(Path(scratch) / PAGE, public, about)
        for candidate in candidates:
            if candidate.version:
                store.attach(candidate.run_id, [page])


def compare_in_mlflow(config: Config, candidates: Sequence[Candidate], sweep: str) -> None:
    """Print how to look at a sweep's runs in MLflow. A failure is a warning."""
    with warn_on_error("the comparison in MLflow is not shown"):
        store = _store_of(config, candidates)
        if store is not None:
            url, command = compare_url(store.location, store.experiment_id, sweep), server_command(store.location)
            lines = ["\nThe runs in MLflow:", *(f"  {line}" for line in (command, url) if line is not None)]
            console.say(*lines, paste=True)


def _exhibit(candidate: Candidate) -> "Exhibit":
    from stages.evaluate.inputs.samples import load_samples
    from stages.report.exhibit import Exhibit

    try:
        evidence = read_evidence(candidate.identity.path.parent)
    except UserError as error:
        return Exhibit(candidate, problem=str(error))
    problem, private, samples = evidence.problem, False, list[Sample]()
    try:
        workloads = requested_workloads(evidence)
        samples, private = load_samples(workloads), workloads.user_path is not None
        if workloads.lengths:
            from stages.evaluate.inputs.lengths import fit_lengths
            from stages.evaluate.inputs.tokens import BundleTokenizer

            samples = fit_lengths(samples, BundleTokenizer(candidate.engine.path), workloads)
    except Refusal as error:
        problem = problem or f"its prompts cannot be made again: {error}"
    return Exhibit(
        candidate,
        problem=problem,
        report=evidence.report,
        rows=evidence.rows,
        samples=samples,
        private=private,
        evidence=evidence.directory,
    )
