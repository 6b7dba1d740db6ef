"""The stages that change or check what serves: promote, rollback, route, monitor, verify."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.core.errors import GateRefusal, UserError
from pipeline.core.redaction import redact_text
from pipeline.registry import promotion, summary
from pipeline.registry.proof import ReplayedEvidence, require_same
from pipeline.registry.summary import Candidate
from pipeline.routing import stages as routes
from pipeline.routing.engines import Engines
from pipeline.run.evidence import find_evidence, read_evidence, registered_candidate, registered_engine
from pipeline.run.job import Run
from pipeline.run.loading import plots, required_libraries
from pipeline.run.verify import replay
from pipeline.terminal import console, tables
from pipeline.terminal.tables import REPORT
from pipeline.trust.binding import read_policy, settle, standing_policy
from pipeline.trust.policy import GatePolicy
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Verdict


def promote(run: Run) -> None:
    """Make the best of a sweep's candidates that passed the champion, or the one that is asked for by name.

    Raises:
        GateRefusal: when the sweep did not finish, none passed, or the best one's evidence does not hold.
        MissingRequirement: when a library that the replay of the evidence takes is not installed.
        UserError: when there are no candidates of the configured model, or the work directory cannot be written.
    """
    last = summary.load(run.config.work, run.config.promote.sweep)
    if last.unfinished is not None and run.config.promote.name is None:
        raise GateRefusal(
            f"stage=promote: {last.unfinished}; run it again to finish it, or promote one that passed with promote.name=NAME"
        )
    promote_from(run, last)


def promote_from(run: Run, last: summary.Summary) -> None:
    """Promote the best candidate of a summary; raises as `promote` does."""
    config, model = run.config, run.config.model.label
    listed = [candidate for candidate in last.candidates if candidate.model == model]
    if not listed:
        others = ", ".join(sorted({candidate.model for candidate in last.candidates}))
        hint = f"the last ones are of {others}: give their model.path" if others else "run stage=evaluate first"
        raise UserError(f"stage=promote: no candidates of model {model} in {config.work}/summary.json; {hint}")
    summary.check_writable(config.work, REPORT)
    store = run.registry()
    find = partial(registered_candidate, config.work / "artifacts")
    log = run.log(store)
    policy = settle(log, read_policy(config.promote), loosen=config.promote.loosen_policy)
    decide_again, replay_again = run.decide_under(policy), run.replay_under(policy)
    candidates = promotion.judged_again(listed, store.registered(), find, decide_again, model, config.promote.name)
    with TemporaryDirectory() as scratch:
        with required_libraries():
            plot = plots().quality_by_memory(candidates, Path(scratch) / "quality_by_memory.png")
        move = promotion.promote(candidates, log, replay_again, decide_again, sweep=last.sweep, name=config.promote.name)
        with _told(move):
            summary.conclude(config.work, move.champion, last.sweep)
            best = next(candidate for candidate in candidates if candidate.name == move.champion)
            assert best.registration is not None, "a promotion takes a registered candidate"
            store.attach(best.registration.run_id, [plot])
            with console.written_to(config.work / REPORT):
                tables.print_occasion()
                tables.print_promotion(candidates, move)
                tables.print_baseline_accuracy(candidates)
            tables.print_mlflow(store.location, store.experiment_id, candidates)


@contextmanager
def _told(move: promotion.Move) -> Iterator[None]:
    """Say what went wrong in the block, which only tells of a move: it is decided, and no failure takes it back."""
    try:
        yield
    except Exception as error:
        detail = redact_text(str(error)).splitlines()[0] if str(error) else type(error).__name__
        console.err.print(f"pipeline: warning: {move.message}; what follows it failed: {detail}", soft_wrap=True, markup=False)


def rollback(run: Run) -> None:
    """Bring the previous champion back.

    Raises:
        UserError: when there is none.
    """
    summary.check_writable(run.config.work)
    move = promotion.rollback(run.log(run.registry()))
    with _told(move):
        summary.conclude(run.config.work, move.champion)
    console.out.print(move.message)


def route(run: Run) -> None:
    """Give classes of work the engines of a routing file, or one class the engine before."""
    if run.config.routing.rollback is not None:
        routes.roll_back(_engines(run), run.config.routing.rollback, _say)
    else:
        routes.route(_engines(run), run.config.routing, _say)


def monitor(run: Run) -> None:
    """Move routes as a snapshot of the fleet asks. Raises GateRefusal when a monitor broke."""
    routes.monitor(_engines(run), run.config.monitor, _say)


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
    console.out.print(line, soft_wrap=True, markup=False)


def verify(run: Run) -> None:
    """Replay the evidence of an engine, offline and read-only.

    Raises:
        GateRefusal: when something differs.
        MissingRequirement: when nothing differs, but something is missing.
    """
    directory = Path(str(run.config.bundle))
    replays = [(evidence, replay(evidence, run.trusted)) for evidence in map(read_evidence, find_evidence(directory))]
    for evidence, findings in replays:
        tables.print_findings(evidence.identity.policy, evidence.identity.model, evidence.directory, findings)
    require_same(f"bundle={directory}", [finding for _, findings in replays for finding in findings])
