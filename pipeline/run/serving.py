"""The stages that change or check what serves: promote, rollback, route, monitor, verify; and report.html."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from pipeline import __version__
from pipeline.config.config import Config
from pipeline.core.errors import REFUSALS, GateRefusal, MissingRequirement, UserError
from pipeline.core.records import Sample
from pipeline.core.redaction import redact_text
from pipeline.core.workloads import WorkloadsConfig
from pipeline.evidence.reading import find_evidence, read_evidence, registered_candidate, registered_engine
from pipeline.evidence.verify import replay, requested_workloads
from pipeline.loading.load import evaluation, plots, reports, required_libraries
from pipeline.pages.comparison import outdated, saved_view
from pipeline.registry import promotion, summary
from pipeline.registry.proof import ReplayedEvidence, require_same
from pipeline.registry.summary import Candidate
from pipeline.routing import stages as routes
from pipeline.routing.engines import Engines
from pipeline.routing.files import read_routing_file
from pipeline.run.job import Run
from pipeline.terminal import console, next_steps, tables
from pipeline.terminal.next_steps import Step
from pipeline.terminal.tables import REPORT
from pipeline.trust.binding import read_policy, settle, standing_policy
from pipeline.trust.policy import GatePolicy
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Verdict

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore

PAGE = "report.html"
"""In the work directory: what the last evaluation, sweep or promotion looked at."""


def promote(run: Run) -> None:
    """Make the best of a sweep's candidates that passed the champion, or the one that is asked for by name.

    Raises:
        GateRefusal: when the sweep did not finish, none passed, or the best one's evidence does not hold.
        MissingRequirement: when a library that the replay of the evidence takes is not installed.
        UserError: when there are no candidates of the configured model, or the work directory cannot be written.
    """
    last = summary.load(run.config.work, run.config.promote.sweep)
    with _advised(lambda _: next_steps.after_no_promotion(run.config, last.candidates)):
        check_finished(run.config, last)
        promote_from(run, last)


def promote_from(run: Run, last: summary.Summary) -> None:
    """Promote the best candidate of a summary; raises as `promote` does."""
    config = run.config
    listed = listed_candidates(config, last)
    summary.check_writable(config.work, REPORT)
    store = run.registry()
    with TemporaryDirectory() as scratch:
        plot = Path(scratch) / "quality_by_memory.png"

        def draw(candidates: Sequence[Candidate]) -> None:
            with required_libraries():
                plots().quality_by_memory(candidates, plot, gates=config.gates)

        candidates, move = move_champion(run, store, listed, last.sweep, draw)
        with _told(move):
            summary.conclude(config.work, move.champion, last.sweep)
            best = next(candidate for candidate in candidates if candidate.name == move.champion)
            assert best.registration is not None, "a promotion takes a registered candidate"
            store.attach(best.registration.run_id, [plot])
            with console.written_to(config.work / REPORT):
                tables.print_occasion()
                tables.print_promotion(candidates, move)
                tables.print_baseline_accuracy(candidates)
            show(
                config,
                candidates,
                lambda: store,
                sweep=last.sweep,
                command=last.command,
                unfinished=last.unfinished,
                champion=move.champion,
                message=move.message,
                passed_over=tables.passed_over(candidates, move),
            )
            compare_in_mlflow(candidates, lambda: store, last.sweep)
            next_steps.show(next_steps.after_promotion(config, move, best.engine.path))


def listed_candidates(config: Config, last: summary.Summary) -> list[Candidate]:
    """Return the configured model's candidates of a summary. Raises UserError where there are none."""
    model = config.model.label
    listed = [candidate for candidate in last.candidates if candidate.model == model]
    if not listed:
        others = ", ".join(sorted({candidate.model for candidate in last.candidates}))
        hint = f"the last ones are of {others}: give their model.path" if others else "run stage=evaluate first"
        raise UserError(f"stage=promote: no candidates of model {model} in {config.work}/summary.json; {hint}")
    return listed


def check_finished(config: Config, last: summary.Summary) -> None:
    """Refuse to choose among the candidates of a sweep that did not finish. Raises GateRefusal."""
    if last.unfinished is not None and config.promote.name is None:
        raise GateRefusal(
            f"stage=promote: {last.unfinished}; run it again to finish it, or promote one that passed with promote.name=NAME"
        )


def move_champion(
    run: Run,
    store: "MlflowStore",
    listed: Sequence[Candidate],
    sweep: str,
    before: Callable[[Sequence[Candidate]], None],
) -> tuple[list[Candidate], promotion.Move]:
    """Judge the candidates of a sweep again, and make the best one the champion of a registry.

    Args:
        run: The job.
        store: The registry.
        listed: The sweep's candidates.
        sweep: Its id.
        before: Told of the candidates, as they are judged now, before anything moves.

    Returns:
        The candidates, and where the aliases point.
    """
    config = run.config
    find = partial(registered_candidate, config.work / "artifacts")
    log, name = run.log(store), config.promote.name
    policy = settle(log, read_policy(config.promote), loosen=config.promote.loosen_policy)
    decide_again, replay_again = run.decide_under(policy), run.replay_under(policy)
    candidates = promotion.judged_again(listed, store.registered(), find, decide_again, config.model.label, name)
    before(candidates)
    with console.doing("replaying the evidence"):
        return candidates, promotion.promote(candidates, log, replay_again, decide_again, sweep=sweep, name=name)


@contextmanager
def _advised(
    steps: Callable[[Exception], list[Step]], refusals: tuple[type[Exception], ...] = (GateRefusal,)
) -> Iterator[None]:
    """Say what to do next where the block is refused."""
    try:
        yield
    except refusals as error:
        next_steps.show(steps(error))
        raise


@contextmanager
def _told(move: promotion.Move) -> Iterator[None]:
    """Say what went wrong in the block, which only tells of a move: it is decided, and no failure takes it back."""
    with _warned(f"{move.message}; what follows it failed"):
        yield


@contextmanager
def _warned(what: str) -> Iterator[None]:
    """Say what went wrong in the block, which decides nothing."""
    try:
        yield
    except Exception as error:
        detail = redact_text(str(error)).splitlines()[0] if str(error) else type(error).__name__
        console.warning(f"{what}: {detail}")


def show(
    config: Config, candidates: Sequence[Candidate], store: "Callable[[], MlflowStore | None]", *, sweep: str, **occasion: Any
) -> None:
    """Write the page about candidates and attach it to their runs. It decides nothing, and a failure is a warning.

    Args:
        config: Any configuration of the command.
        candidates: What was judged, in the order of the summary.
        store: Opens the tracking store; nothing is attached where it returns None.
        sweep: Id of the candidates' sweep.
        occasion: More of what the command says of them: fields of `stages.report.Occasion`.
    """
    with _warned(f"{PAGE} is not complete"), required_libraries(), TemporaryDirectory() as scratch:
        about = reports().Occasion(model=config.model.label, workdir=config.work, sweep=sweep, version=__version__, **occasion)
        exhibits = _exhibits(candidates)
        page = reports().write_page(config.work / PAGE, exhibits, about)
        console.result("report", f"\nreport: {escape(str(page))}", paste=True, file=page)
        tracked = [one.registration.run_id for one in candidates if one.registration is not None]
        opened = store() if tracked else None
        if opened is None:
            return
        if any(exhibit.own for exhibit in exhibits):
            page = reports().write_page(Path(scratch) / PAGE, [exhibit.without_own for exhibit in exhibits], about)
        for run_id in tracked:
            opened.attach(run_id, [page])


def compare_in_mlflow(candidates: Sequence[Candidate], store: "Callable[[], MlflowStore | None]", sweep: str) -> None:
    """Save the view of a sweep's comparison and print its address, or that of the only candidate's run. A failure warns."""
    with _warned("MLflow's comparison is not there"):
        tracked = [candidate for candidate in candidates if candidate.registration is not None]
        opened = store() if tracked else None
        if opened is None:
            return
        if len(tracked) > 1:
            opened.save_view(sweep, saved_view(sweep, time.time()))
            for name in outdated(opened.views()):
                opened.remove_view(name)
        tables.print_mlflow(opened.location, opened.experiment_id, tracked, sweep)


def _exhibits(candidates: Sequence[Candidate]) -> list[Any]:
    """Return the candidates with their evidence, as far as that can be read."""
    known: dict[str, list[Sample]] = {}

    def asked(workloads: WorkloadsConfig) -> list[Sample]:
        key = workloads.model_dump_json()
        if key not in known:
            known[key] = evaluation().load_samples(workloads)
        return known[key]

    return [_exhibit(candidate, asked) for candidate in candidates]


def _exhibit(candidate: Candidate, asked: Callable[[WorkloadsConfig], list[Sample]]) -> Any:
    try:
        evidence = read_evidence(candidate.identity.path.parent, candidate.engine.path, candidate.baseline.path)
    except UserError as error:
        return reports().Exhibit(candidate, problem=str(error))
    identity, problem, own = evidence.identity, evidence.problem, set[str]()
    samples = list[Sample]()
    try:
        workloads = requested_workloads(evidence)
        samples = asked(workloads)
        if workloads.jsonl is not None:
            own = {sample.id for sample in samples} - {s.id for s in asked(workloads.model_copy(update={"jsonl": None}))}
    except REFUSALS as error:
        problem = problem or f"its prompts cannot be made again: {error}"
    return reports().Exhibit(
        candidate,
        problem=problem,
        report=evidence.report,
        rows=evidence.rows,
        samples=samples,
        own=own,
        binds=identity.binds,
        settings={
            "kv": identity.link("engine").parts["config"].get("kv", {}),
            "gates": identity.gates.model_dump(mode="json"),
            **identity.link("evaluation").parts["config"],
        },
        evidence=evidence.directory,
    )


def rollback(run: Run) -> None:
    """Bring the previous champion back.

    Raises:
        UserError: when there is none.
    """
    summary.check_writable(run.config.work)
    with _advised(lambda _: next_steps.after_rollback(run.config), (UserError,)):
        move = promotion.rollback(run.log(run.registry()))
    with _told(move):
        summary.conclude(run.config.work, move.champion)
    console.result("champion", escape(move.message), champion=move.champion, message=move.message)
    next_steps.show(next_steps.after_rollback(run.config))


def route(run: Run) -> None:
    """Give classes of work the engines of a routing file, or one class the engine before."""
    if run.config.routing.rollback is not None:
        routes.roll_back(_engines(run), run.config.routing.rollback, _say)
        next_steps.show(next_steps.after_rollback(run.config))
    else:
        routes.route(_engines(run), run.config.routing, _say)
        next_steps.show(next_steps.after_route(run.config, sorted(read_routing_file(run.config.routing).by_class)))


def monitor(run: Run) -> None:
    """Move routes as a snapshot of the fleet asks. Raises GateRefusal when a monitor broke."""
    try:
        routes.monitor(_engines(run), run.config.monitor, _say)
    finally:
        next_steps.show(next_steps.after_rollback(run.config))


def _engines(run: Run) -> Engines:
    find = partial(registered_engine, run.config.work / "artifacts")
    store = run.registry()
    log = run.log(store)
    log.repair()

    @cache
    def policy() -> GatePolicy | None:  # the way back of a broken engine must not wait for it
        return standing_policy(log, log.read())

    def replay_again(candidate: Candidate) -> ReplayedEvidence:
        return run.replay_under(policy())(candidate)

    def decide_again(report: EvaluationReport, rows: Sequence[SampleRow]) -> Verdict:
        return run.decide_under(policy())(report, rows)

    return Engines(store, log, find, replay_again, decide_again)


def _say(line: str) -> None:
    console.say(escape(line))


def verify(run: Run) -> None:
    """Replay the evidence of an engine, offline and read-only.

    Raises:
        GateRefusal: when something differs.
        MissingRequirement: when nothing differs, but something is missing.
    """
    directory = Path(str(run.config.bundle))
    with console.doing("replaying the evidence"):
        replays = [(evidence, replay(evidence, run.trusted)) for evidence in map(read_evidence, find_evidence(directory))]
    for evidence, findings in replays:
        tables.print_findings(evidence.identity.policy, evidence.identity.model, evidence.directory, findings)

    def after(error: Exception) -> list[Step]:
        return next_steps.after_difference(run.config, differs=isinstance(error, GateRefusal))

    with _advised(after, (GateRefusal, MissingRequirement)):
        require_same(f"bundle={directory}", [finding for _, findings in replays for finding in findings])
    built = not any(evidence.identity.served for evidence, _ in replays)
    next_steps.show(next_steps.after_verify(run.config, built=built))
