"""Runs the stage of one job: STAGES maps its name to its function. Start reading here.

The stages up to evaluate make the artifacts that they need, or reuse those in the store. Promote, rollback and verify work
on what earlier commands left.

checkpoint -> quantize -> export -> build -> evaluate against the FP16-KV engine -> promote
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

from rich.markup import escape

from pipeline.artifacts.files import store_of
from pipeline.artifacts.store import Store, used
from pipeline.config.config import JUDGING, MAKING, Config
from pipeline.core.errors import DEFECT, EXIT_CODES, INTERRUPTED, SEVERITY, GateRefusal, MissingRequirement, describe, exit_code
from pipeline.core.redaction import redact_text
from pipeline.evidence.identity import IDENTITY_FILE
from pipeline.loading import required_libraries
from pipeline.pages.page import run_page
from pipeline.registry import summary
from pipeline.registry.proof import PASS
from pipeline.registry.runs import open_store, track
from pipeline.registry.summary import Candidate, Cited
from pipeline.run import planning
from pipeline.run.inputs import UNRECORDED, WITHOUT_CHECKPOINT
from pipeline.run.job import Run
from pipeline.run.served import open_chain
from pipeline.run.serving import monitor, promote, promote_from, rollback, route, verify
from pipeline.run.showing import compare_in_mlflow, show
from pipeline.run.tuning import tune
from pipeline.terminal import console, next_steps, tables
from pipeline.terminal.commands import typed, whole
from pipeline.terminal.junit import JUNIT, write_junit
from pipeline.terminal.planning_tables import command_line
from pipeline.terminal.tables import REPORT
from pipeline.upkeep.prune import prune
from pipeline.upkeep.status import show_status
from pipeline.verdict.report import REPORT_FILE, load_report, load_rows
from pipeline.verdict.tracked import flat_metrics

GATE_EXIT = EXIT_CODES[GateRefusal]
UNFINISHED_EXIT = EXIT_CODES[MissingRequirement]
"""Of a sweep with jobs that nobody interrupted and that did not end: this machine, or another one, killed them."""


def quantize(run: Run) -> None:
    """Quantize the checkpoint's weights, measure the cache's static scales, and write ModelOpt's exports."""
    quantized, exports = run.chain.made_by("quantize")
    lines = f"quantized checkpoint: {quantized.path}", f"ModelOpt's exports: {exports.path}"
    console.result("quantized", *lines, paste=True, checkpoint=quantized.path, exports=exports.path)
    if not run.sweeping:
        next_steps.show(next_steps.after_quantize(typed()))


def build(run: Run) -> None:
    """Build the engine bundle."""
    (bundle,) = run.chain.made_by("build")
    lines = f"engine bundle: {bundle.path}", f"digest: {bundle.digest}"
    console.result("engine", *lines, paste=True, bundle=bundle.path, digest=bundle.digest)
    for line in run.chain.backend.describe(bundle.path):
        console.say(line)
    hint = run.chain.onnx_report(run.config.kv)
    if hint is not None:
        console.say(escape(hint))
    if not run.sweeping:
        next_steps.show(next_steps.after_build(typed()))


def evaluate(run: Run) -> None:
    """Judge the engine against the FP16-KV engine and register it.

    Raises:
        GateRefusal: when it did not pass; not in a sweep, where `conclude_sweep` decides once all candidates are judged.
    """
    config, chain = run.config, run.chain
    with console.doing("opening MLflow"):
        store = open_store(config.tracking, config.work, config.model.label)
    with track(
        store, run.sweep, run.label, config.backend.name, config.model_dump(mode="json", exclude={"log", "dry"})
    ) as tracked:
        evaluation, engine, baseline = chain.made_by("evaluate")
        report, rows = load_report(evaluation.path), load_rows(evaluation.path)
        with console.doing("deciding"):
            verdict = run.decide(report, rows)
        identity = chain.identity(config.kv, report, verdict)
        report_path = evaluation.path / REPORT_FILE
        candidate = Candidate(
            name=run.label,
            policy=config.kv.name,
            model=config.model.label,
            backend=config.backend.name,
            **Candidate.decided(verdict),
            metrics=flat_metrics(report),
            engine=Cited(path=engine.path, digest=engine.digest),
            baseline=Cited(path=baseline.path, digest=baseline.digest),
            report=Cited(path=report_path, digest=summary.evidence_digest(report_path)),
            identity=Cited(path=identity.path / IDENTITY_FILE, digest=identity.files[IDENTITY_FILE]),
            signed_by=run.keys.signer_id,
        )
        for stage in chain.finished:
            artifact = stage.artifact
            tracked.stage(stage.title, stage.params, digest=artifact.digest, seconds=artifact.seconds, reused=artifact.reused)
        with console.doing("registering the engine"):
            page = run_page(candidate, report, rows, sweep=run.sweep, model=config.model.path, workdir=config.work)
            candidate = tracked.conclude(candidate, page)
    summary.record(config.work, run.sweep, candidate)
    tables.print_verdict(candidate)
    tables.print_conformance(verdict)
    tables.print_evidence(report, verdict)
    if not run.sweeping:
        tables.print_baseline_accuracy([candidate])
        show(config, [candidate], lambda: store, sweep=run.sweep, command=whole())
        if not (config.stage == "all" and candidate.verdict == PASS):  # a promotion says it, too
            compare_in_mlflow([candidate], lambda: store, run.sweep)
        promotes = config.stage == "all" and config.tracking.enabled
        next_steps.show(next_steps.after_judging(config, [candidate], typed(), promotes=promotes))
    if candidate.verdict != PASS and not run.sweeping:
        raise GateRefusal(f"{candidate.name} is not good enough: {candidate.verdict}")


def evaluate_and_promote(run: Run) -> None:
    """Evaluate, and promote what passed. Jobs of a sweep only register: else the last to finish would win."""
    evaluate(run)
    if not run.sweeping and run.config.tracking.enabled:
        promote_from(run, summary.load(run.config.work, run.sweep))


STAGES: dict[str, Callable[[Run], None]] = {
    "quantize": quantize,
    "build": build,
    "evaluate": evaluate,
    "promote": promote,
    "rollback": rollback,
    "verify": verify,
    "capacity": lambda run: planning.show_capacity(run.config, run.sweeping),
    "recommend": lambda run: planning.recommend_policy(run.config, run.sweeping),
    "all": evaluate_and_promote,
    "tune": lambda run: tune(run.chain),
    "route": route,
    "monitor": monitor,
    "status": lambda run: show_status(run.config, as_json=False),
    "prune": lambda run: prune(run.config),
}


def holding(config: Config) -> AbstractContextManager[None]:
    """Keep stage=prune from the artifacts that a command uses, while its block runs."""
    if config.stage in ("status", "prune"):  # one looks alone, the other holds them for itself
        return nullcontext()
    root = config.work / "artifacts"
    if config.stage == "verify":  # it may be of another work directory, or of none
        found = store_of(Path(str(config.bundle)).resolve() / "bundle.json")
        return used(found, make=False) if found is not None else nullcontext()
    return used(root, make=config.stage in MAKING or root.is_dir())


def run(
    config: Config,
    sweep: str,
    sweeping: bool,
    changed: Sequence[str],
    number: int = 1,
    of: int = 1,
    *,
    beside_others: bool = False,
) -> None:
    """Run one job and record in summary.json how it ended.

    Args:
        config: The job's configuration.
        sweep: Id of the command that the job belongs to.
        sweeping: Whether that command has several jobs.
        changed: Overrides that belong to the candidate's display name.
        number: Of the job among those of the command, from 1.
        of: How many jobs the command has.
        beside_others: Whether they run at once.

    Raises:
        UserError, GateRefusal, MissingRequirement: what a person or CI can act on; any other exception is a defect.
    """
    label, judging = " ".join([config.kv.name, *changed]), config.stage in JUDGING
    if judging and not sweeping:
        summary.begin(config.work, sweep, [label], command=whole())
    code, said = DEFECT, None
    try:
        about = None if config.stage in WITHOUT_CHECKPOINT else f" of {config.model.path}"
        console.begin(console.Job(config.stage, label, number, of, beside_others), about)
        job = Run(config, open_chain(config, Store(config.work / "artifacts")), sweep, sweeping, label)
        with holding(config), required_libraries():
            STAGES[config.stage](job)
        code = 0
    except Exception as error:
        code, said = exit_code(error), redact_text(describe(error))
        raise
    except (KeyboardInterrupt, SystemExit):
        code = INTERRUPTED
        raise
    finally:
        # Only an evaluation's sweep becomes the last one: other stages leave its candidates.
        if sweeping or judging:
            last = summary.finish(config.work, sweep, code, number, said, latest=judging)
            if not sweeping:
                write_junit(config.work / JUNIT, last)
        elif config.stage not in UNRECORDED:
            summary.finish(config.work, None, code)


def begin_sweep(config: Config, sweep: str, names: Sequence[str], base: Sequence[str]) -> None:
    """Note the jobs of a sweep, before the first of them runs. They may run in processes of their own, on other machines.

    Args:
        config: Of its first job.
        sweep: Its id.
        names: Of its jobs.
        base: What was typed.
    """
    command = command_line(base, (), sweep=True)
    summary.begin(config.work, sweep, names, latest=config.stage in JUDGING, command=command)


def conclude_sweep(
    config: Config, sweep: str, base: Sequence[str], swept: Sequence[str], code: int = 0, elsewhere: bool = False
) -> int:
    """Print the comparison of a sweep's candidates and return the sweep's exit code.

    It is the worst of its jobs' codes and of what ended them all; if all ended well, it says whether a candidate passed.

    Args:
        config: Of its first job.
        sweep: Its id.
        base: What was typed.
        swept: Keys that differ between its jobs.
        code: What ended its jobs before their time; 0 where nothing did.
        elsewhere: Whether its jobs wrote into files what they were refused for.
    """
    last = summary.load(config.work, sweep)
    for number, error in sorted(last.errors.items()) if elsewhere else ():
        name = console.Job(config.stage, last.names[number - 1], number, len(last.names)).name
        for line in error.splitlines():
            console.error(f"{name}{line}", exit_code=last.exit_codes[number])
    if config.stage in JUDGING:
        write_junit(config.work / JUNIT, last)
    codes = [code, last.exit_code]
    if last.candidates:
        with console.written_to(config.work / REPORT):
            tables.print_occasion()
            tables.print_comparison(last.candidates)
            tables.print_baseline_accuracy(last.candidates)
        store = cache(lambda: open_store(config.tracking, config.work, last.candidates[0].model))
        show(config, last.candidates, store, sweep=sweep, unfinished=last.unfinished, command=last.command)
        compare_in_mlflow(last.candidates, store, sweep)
        steps = next_steps.after_judging(config, last.candidates, base, swept=swept, unfinished=last.unfinished is not None)
        next_steps.show(steps)
    elif config.stage in ("quantize", "build"):
        following = next_steps.after_quantize if config.stage == "quantize" else next_steps.after_build
        next_steps.show(following(base, sweep=True))
    if last.unfinished is not None:
        console.error(f"{last.unfinished}; run it again to go on", exit_code=UNFINISHED_EXIT)
        codes.append(UNFINISHED_EXIT)
    elif last.candidates and not any(candidate.verdict == PASS for candidate in last.candidates):
        console.error("no candidate of the sweep passed", exit_code=GATE_EXIT)
        codes.append(GATE_EXIT)
    worst = max(codes, key=SEVERITY.index)
    if config.stage in JUDGING:
        summary.fail(config.work, sweep, worst)
    else:
        summary.forget(config.work, sweep)
        if config.stage not in UNRECORDED:
            summary.finish(config.work, None, worst)
    return worst
