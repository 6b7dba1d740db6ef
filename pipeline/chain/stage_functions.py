"""The functions of the stages, and the checks that single stages need. `pipeline.config.config` declares the stages."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.chain.job import Run
from pipeline.chain.planning import recommend_policy, show_capacity
from pipeline.chain.showing import compare_in_mlflow, show_page, warn_on_error
from pipeline.cli import console, next_steps, tables
from pipeline.cli.progress import show_progress
from pipeline.cli.upkeep import prune, show_status
from pipeline.config.config import Config, Stage
from pipeline.config.explain import suggest
from pipeline.evidence.reading import bundle_directory, find_evidence, first_refusal, read_evidence, with_questions
from pipeline.evidence.verify import replay
from pipeline.registry import routing, summary
from pipeline.store.store import used
from stages.core.errors import GateRefusal, UserError
from stages.core.files import store_of
from stages.engines.bundle import BUNDLE_FILE
from stages.verdict.candidate import Candidate
from stages.verdict.gates.decide import decide
from stages.verdict.report import load_report, load_rows

REPORTING_FAILED = "a later step failed"
"""End of the warning about a move that succeeded but could not be reported."""

UNREAD = {"log", "dry", "bundle", "capacity", "monitor", "promote", "routing", "signing"}
"""Groups and keys that do not affect a verdict, which MLflow does not log."""


def quantize(run: Run) -> None:
    exports = run.make()
    checkpoint = exports.path / "checkpoint"
    lines = f"quantized checkpoint: {checkpoint}", f"with the cache's scales and ModelOpt's exports: {exports.path}"
    console.say(*lines, paste=True)


def build(run: Run) -> None:
    bundle = run.make()
    lines = f"engine bundle: {bundle.path}", f"digest: {bundle.digest}"
    console.say(*lines, paste=True)


def evaluate(run: Run) -> None:
    """Judge the engine against the baseline (the engine with an FP16 cache), and register it."""
    config, steps, store = run.config, run.verdict_steps, run.registry
    evaluation = steps.report()
    with show_progress("deciding"):
        verdict = decide(load_report(evaluation.path), load_rows(evaluation.path), config.gates)
    evidence = read_evidence(steps.identity(evaluation, verdict).path)
    candidate = evidence.candidate(run.label)
    if store is not None:
        read = config.model_dump(mode="json", exclude=UNREAD)
        with show_progress("registering the engine"):
            candidate = store.register(candidate, evidence.rows, sweep=run.sweep, config=read)
    summary.record(config.work, run.sweep, candidate)
    tables.print_verdict(candidate, quick_check=config.workloads.is_quick_check)
    if store is not None:
        console.say(f"registered: {store.location.model_name} version {candidate.version} at {store.location}")


def promotable(config: Config) -> summary.Summary:
    """Return the summary of the named sweep, or of the model's last sweep with a registered candidate.

    Raises GateRefusal if it did not finish and `promote.name` is not given; UserError if it has no candidate of the model.
    """
    last, model = summary.load(config.work, config.promote.sweep), config.model.label
    if config.promote.sweep is None and not any(item.version and item.model == model for item in last.candidates):
        judged = summary.last_judged(config.work, model)
        if judged is not None and judged.sweep != last.sweep:
            nothing = f"the last command registered no candidate of {model}"
            console.warning(f"{nothing}; promoting from sweep {judged.sweep}; promote.sweep=ID names another")
            last = judged
    if last.unfinished is not None and config.promote.name is None:
        if last.candidates:  # perhaps all of another model, for which waiting does not help
            candidates_of(config, last)
        raise GateRefusal(
            f"stage=promote: {last.unfinished}; wait if it still runs; otherwise run it again, promote a candidate "
            "that passed with promote.name=NAME, or use another sweep with promote.sweep=ID"
        )
    candidates_of(config, last)
    return last


def promote(run: Run) -> None:
    """Make the best passing candidate of a sweep the champion, or the candidate that `promote.name` names."""
    last = promotable(run.config)
    promote_from(run, last, unfinished=last.unfinished)


def candidates_of(config: Config, last: summary.Summary) -> list[Candidate]:
    """Return the configured model's candidates in a summary. Raises UserError if none match, or promote.name is unknown."""
    model, name = config.model.label, config.promote.name
    candidates = [candidate for candidate in last.candidates if candidate.model == model]
    if not candidates:
        models = ", ".join(sorted({candidate.model for candidate in last.candidates}))
        hint = f"the last ones are of {models}: give their model.path" if models else "run stage=evaluate first"
        place = f"sweep {last.sweep}" if last.sweep else f"{config.work}/summary.json"
        raise UserError(f"stage=promote: no candidates of model {model} in {place}; {hint}")
    names = [candidate.name for candidate in candidates]
    if name is not None and name not in names:
        raise UserError(f"promote.name={name}: the sweep has no candidate of this name{suggest(name, names)}")
    return candidates


def promote_from(run: Run, last: summary.Summary, *, unfinished: str | None = None) -> None:
    """Promote the best candidate of a summary. Raises as `candidates_of` and `Engines.promote` do.

    `unfinished`: message about missing jobs for report.html. A job that promotes its own candidate is still running, and the
    summary would report this job as missing.
    """
    config, model, name = run.config, run.config.model.label, run.config.promote.name
    judged = candidates_of(config, last)
    with run.engines() as engines:
        with show_progress("replaying the evidence"):
            move = engines.promote(judged, model, name)
        candidates = move.candidates
        with warn_on_error(f"{move.message}; {REPORTING_FAILED}"):
            summary.note_champion(config.work, move.champion, last.sweep)
            tables.print_comparison(candidates)
            console.say(console.styled("green", move.message))
            for rejected, reason in move.passed_over.items():
                console.say(f"  not {rejected}: {reason}")
            show_page(config, candidates, last, unfinished=unfinished, move=move)
            compare_in_mlflow(config, candidates, last.sweep)
    best = next(candidate for candidate in candidates if candidate.name == move.champion)
    with warn_on_error(f"{move.message}; {REPORTING_FAILED}"):
        if not best.engine.path.is_dir():  # the champion stays, and was downloaded only to compete
            console.say(f"Load it with: pipeline.api.champion({engines.model.name!r}), and the store and keys of this command")
            return
        console.say(f"Serve it with: {next_steps.serving(best.engine.path)}", paste=True)
        next_steps.after_promotion(config, best.engine.path).show()


def rollback(run: Run) -> None:
    # decides=False: the recorded verdict counts, so that a user need not repeat the gates of the promotion.
    with run.engines(decides=False) as engines, show_progress("replaying the evidence"):
        move = engines.rollback()
    with warn_on_error(f"{move.message}; {REPORTING_FAILED}"):
        summary.note_champion(run.config.work, move.champion)
    console.say(move.message)


def route(run: Run) -> None:
    wanted = run.config.routing
    with run.engines() as engines:
        _say(routing.roll_back(engines, wanted.rollback) if wanted.rollback else routing.route(engines, wanted.routes or {}))


def monitor(run: Run) -> None:
    """Move routes by a snapshot of the servers. Raises GateRefusal if a route moved back, or could not make a needed move."""
    with run.engines() as engines:
        _say(routing.monitor(engines, run.config.monitor))


def _say(lines: Iterable[str]) -> None:
    """Print the lines one by one: a later one may raise."""
    for line in lines:
        console.say(line)


def verify(run: Run) -> None:
    """Replay the evidence of an engine, offline. Only the lock files of its store are written."""
    directory = bundle_directory(str(run.config.bundle))
    signing, workloads = run.config.signing, run.config.workloads
    store = store_of(directory.resolve() / BUNDLE_FILE)  # perhaps outside of the work directory
    with (
        nullcontext() if store is None else used(store),
        show_progress("replaying the evidence"),
        TemporaryDirectory(prefix="kvgate-") as scratch,
    ):
        found = enumerate(map(read_evidence, find_evidence(directory)))
        all_evidence = [with_questions(evidence, workloads, Path(scratch, str(number))) for number, evidence in found]
        replays = [(evidence, replay(evidence, signing)) for evidence in all_evidence]
    for evidence, findings in replays:
        identity = evidence.identity
        console.show(tables.findings_grid(identity.policy, identity.model, evidence.directory, findings))
    refusal = first_refusal([finding for _, findings in replays for finding in findings])
    if refusal is not None:
        raise type(refusal)(f"bundle={directory}: {refusal}")


FUNCTIONS: dict[Stage, Callable[[Run], None]] = {
    "quantize": quantize,
    "build": build,
    "evaluate": evaluate,
    "all": evaluate,
    "promote": promote,
    "rollback": rollback,
    "verify": verify,
    "route": route,
    "monitor": monitor,
    "capacity": show_capacity,
    "recommend": recommend_policy,
    "status": lambda run: show_status(run.config),
    "prune": lambda run: prune(run.config),
}

CHECKS: dict[Stage, Callable[[Config], object]] = {
    "verify": lambda config: bundle_directory(str(config.bundle)),
    "monitor": lambda config: routing.read_snapshot(config.monitor),
}
