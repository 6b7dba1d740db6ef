"""The stages that change or check what serves: promote, rollback, route, monitor, verify, audit."""

from collections.abc import Iterable

from rich.markup import escape

from pipeline.chain.job_run import Run
from pipeline.chain.showing import compare_in_mlflow, show_page, warn_on_error
from pipeline.cli import console, next_steps, tables
from pipeline.cli.progress import show_progress
from pipeline.config.config import Config
from pipeline.config.explain import suggest
from pipeline.evidence.reading import bundle_directory, find_evidence, read_evidence
from pipeline.evidence.verify import replay
from pipeline.loading import open_backend
from pipeline.registry import routing, summary
from pipeline.registry.promotion import require_same
from stages.checkpoints.places import locate_checkpoint
from stages.core.errors import GateRefusal, UserError
from stages.policies.delivery import scale_findings
from stages.verdict.candidate import Candidate

REPORTING_FAILED = "a later step failed"
"""Added to a warning if reporting a move failed: the move itself stands."""


def promotable(config: Config) -> summary.Summary:
    """Return the summary of the sweep that stage=promote uses: the named one, or the last one with a candidate.

    Raises:
        GateRefusal: The sweep did not finish, and `promote.name` is not given.
        UserError: It has no candidate of the model.
    """
    last = summary.load(config.work, config.promote.sweep)
    if config.promote.sweep is None and not last.candidates and (judged := summary.last_judged(config.work)) is not None:
        console.warning(f"the last command judged nothing; promoting from sweep {judged.sweep}; promote.sweep=ID names another")
        last = judged
    if last.unfinished is not None and config.promote.name is None:
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
    """Return the candidates of the configured model in a summary. Raises UserError if there are none."""
    model = config.model.label
    candidates = [candidate for candidate in last.candidates if candidate.model == model]
    if not candidates:
        models = ", ".join(sorted({candidate.model for candidate in last.candidates}))
        hint = f"the last ones are of {models}: give their model.path" if models else "run stage=evaluate first"
        raise UserError(f"stage=promote: no candidates of model {model} in {config.work}/summary.json; {hint}")
    return candidates


def promote_from(run: Run, last: summary.Summary, *, unfinished: str | None = None) -> None:
    """Promote the best candidate of a summary. Raises as `promote` does.

    The page shows `unfinished`. It is not read from the summary: a job that promotes its own candidate is still running, and
    the summary would report this job as unfinished.
    """
    config, model, name = run.config, run.config.model.label, run.config.promote.name
    judged = candidates_of(config, last)
    names = [candidate.name for candidate in judged]
    if name is not None and name not in names:
        raise UserError(f"promote.name={name}: the sweep has no candidate of this name{suggest(name, names)}")
    engines = run.engines()
    with show_progress("replaying the evidence"):
        move = engines.promote(judged, model, name)
    candidates = move.candidates
    with warn_on_error(f"{move.message}; {REPORTING_FAILED}"):
        summary.note(config.work, last.sweep, champion=move.champion)
        tables.print_comparison(candidates)
        console.result("champion", f"[green]{escape(move.message)}[/]", champion=move.champion, message=move.message)
        for rejected, reason in tables.reasons_against(candidates, move).items():
            console.result("not_chosen", f"  not {escape(rejected)}: {escape(reason)}", candidate=rejected, reason=reason)
        show_page(config, candidates, last, unfinished=unfinished, move=move)
        compare_in_mlflow(config, candidates, last.sweep)
        best = next(candidate for candidate in candidates if candidate.name == move.champion)
        backend = config.backend if config.backend.name == best.backend else None
        console.say(f"Serve it with: {escape(next_steps.serving(best.engine.path, backend))}", paste=True)
        next_steps.show(next_steps.after_promotion(config, best.engine.path))


def rollback(run: Run) -> None:
    """Bring the previous champion back."""
    engines = run.engines()
    with show_progress("replaying the evidence"):
        move = engines.rollback()
    with warn_on_error(f"{move.message}; {REPORTING_FAILED}"):
        summary.note(run.config.work, None, champion=move.champion)
    console.result("champion", escape(move.message), champion=move.champion, message=move.message)


def route(run: Run) -> None:
    config = run.config.routing
    if config.rollback is not None:
        _say(routing.roll_back(run.engines(), config.rollback))
    else:
        _say(routing.route(run.engines(), config.routes or {}))


def monitor(run: Run) -> None:
    """Move routes according to a snapshot of the fleet. Raises GateRefusal if a monitor broke."""
    _say(routing.monitor(run.engines(), run.config.monitor))


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        console.say(escape(line))


def verify(run: Run) -> None:
    """Replay the evidence of an engine, offline and read-only."""
    directory = bundle_directory(str(run.config.bundle))
    signing = run.config.signing
    with show_progress("replaying the evidence"):
        replays = [(evidence, replay(evidence, signing)) for evidence in map(read_evidence, find_evidence(directory))]
    for evidence, findings in replays:
        identity = evidence.identity
        console.show("findings", tables.findings_grid(identity.policy, identity.model, evidence.directory, findings))
    require_same(f"bundle={directory}", [finding for _, findings in replays for finding in findings])


def audit(run: Run) -> None:
    """Print a line for each problem with a checkpoint's scales that an engine would load. Nothing is judged or written.

    Raises:
        GateRefusal: if the engine would not or could not use a scale as carried.
        UserError: if the checkpoint cannot be read, or the backend does not load a checkpoint's scales.
    """
    config = run.config
    audited = open_backend(config.backend).audit(locate_checkpoint(config.model.path))
    lines = [*scale_findings(audited.layers), *audited.problems]
    sides = 2 * len(audited.layers)
    _say(lines)
    if lines:
        raise GateRefusal(
            f"model.path={config.model.path}: {len(lines)} findings on {sides} scales of {len(audited.layers)} layers "
            f"({audited.engine}); stage=build backend={config.backend.name} writes a checkpoint whose scales it loads"
        )
    used = [scale for layer in audited.layers for scales in layer.used.values() for scale in scales]
    _say([f"{audited.engine}: all {sides} scales are used as carried, from {min(used):.3g} to {max(used):.3g}"])
