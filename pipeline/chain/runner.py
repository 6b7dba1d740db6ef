"""Runs the stage of one job: STAGES maps the stage's name to its function. Start reading here.

The stages up to evaluate make the artifacts that they need, or reuse artifacts in the store. Promote, rollback and verify
use the results of earlier commands.

checkpoint -> quantize -> export -> build -> evaluate against the FP16-KV engine -> promote
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pipeline.chain import serving
from pipeline.chain.planning import recommend_policy, show_capacity, tune
from pipeline.chain.run import Run, open_store
from pipeline.chain.showing import remove_page, show
from pipeline.cli import console, next_steps, tables
from pipeline.cli.junit import JUNIT, write_junit
from pipeline.cli.prune import prune
from pipeline.cli.status import show_status
from pipeline.config.config import Config
from pipeline.evidence.identity import IDENTITY_FILE, read_identity
from pipeline.evidence.reading import judged_candidate
from pipeline.loading import required_libraries
from pipeline.registry import summary
from pipeline.store.store import used
from stages.core.errors import DEFECT, INTERRUPTED, CannotBeJudged, GateRefusal, exit_code
from stages.core.files import store_of
from stages.verdict.candidate import Cited, not_passed
from stages.verdict.gates import decide
from stages.verdict.report import load_report, load_rows


def quantize(run: Run) -> None:
    exports = run.make()
    checkpoint = exports.path / "checkpoint"
    lines = f"quantized checkpoint: {checkpoint}", f"with the cache's scales and ModelOpt's exports: {exports.path}"
    console.result("quantized", *lines, paste=True, checkpoint=checkpoint, exports=exports.path)
    if not run.sweeping:
        next_steps.show(next_steps.after_making("quantize", next_steps.typed()))


def build(run: Run) -> None:
    bundle = run.make()
    lines = f"engine bundle: {bundle.path}", f"digest: {bundle.digest}"
    console.result("engine", *lines, paste=True, bundle=bundle.path, digest=bundle.digest)
    if not run.sweeping:
        next_steps.show(next_steps.after_making("build", next_steps.typed()))


def evaluate(run: Run) -> None:
    """Judge the engine against the FP16-KV engine and register it; with stage=all, promote it if it passed.

    Jobs of a sweep only register. Otherwise the job that finishes last would be promoted.
    """
    config, steps = run.config, run.steps
    with console.progress("opening MLflow"):
        store = open_store(config.tracking, config.work, config.model.label)
    whole = config.model_dump(mode="json", exclude={"log", "dry"})
    recorded = nullcontext("") if store is None else store.candidate(run.sweep, run.label, config.backend.name, whole)
    with recorded as run_id:
        evaluation = run.make()
        report, rows = load_report(evaluation.path), load_rows(evaluation.path)
        with console.progress("deciding"):
            verdict = decide(report, rows, config.gates)
        sealed = steps.identity(evaluation, verdict)
        cited = Cited(path=sealed.path / IDENTITY_FILE, digest=sealed.files[IDENTITY_FILE])
        candidate = judged_candidate(read_identity(cited.path), cited, report, steps.store.root)
        candidate = candidate.model_copy(update={"name": run.label})
        if store is not None:
            with console.progress("registering the engine"):
                candidate = store.conclude(run_id, candidate, rows)
    last = summary.record(config.work, run.sweep, candidate)
    look = next_steps.is_look(next_steps.typed()) and candidate.verdict == "INCONCLUSIVE"
    tables.print_verdict(candidate, look=look)
    if run.sweeping:
        return
    promotes = config.stage == "all" and config.tracking.enabled
    show(config, [candidate], sweep=run.sweep, command=next_steps.whole())
    if not (promotes and candidate.verdict == "PASS"):  # a promotion prints its own next step
        asking = sum(artifact.seconds for _, artifact in steps.finished if artifact.stage in ("baseline", "round"))
        next_steps.show(next_steps.after_judging(config, [candidate], next_steps.typed(), asking_s=asking))
    if candidate.verdict != "PASS" and not look:
        raise GateRefusal(not_passed(candidate.name, candidate.verdict, candidate.checks))
    if promotes:
        serving.promote_from(run, last)


STAGES: dict[str, Callable[[Run], None]] = {
    "quantize": quantize,
    "build": build,
    "evaluate": evaluate,
    "all": evaluate,
    "tune": tune,
    **serving.STAGES,
    "capacity": lambda run: show_capacity(run.config),
    "recommend": lambda run: recommend_policy(run.config),
    "status": lambda run: show_status(run.config),
    "prune": lambda run: prune(run.config),
}


def holding(config: Config) -> AbstractContextManager[None]:
    """Prevent stage=prune from removing artifacts that a command uses while the block runs."""
    if config.stage in ("status", "prune", "audit"):  # status and audit only read; prune takes its own lock
        return nullcontext()
    root = config.artifacts
    if config.stage == "verify":  # the bundle may be outside of any work directory
        store = store_of(Path(str(config.bundle)).resolve() / "bundle.json")
        return used(store, make=False) if store is not None else nullcontext()
    return used(root, make=config.facts.makes or root.is_dir())


def run(config: Config, sweep: str, job: console.RunningJob | None = None, *, sweeping: bool = False) -> None:
    """Run one job, and record its candidate and its exit code in summary.json.

    Raises UserError, GateRefusal or MissingRequirement for problems that a person or CI can act on. Other exceptions are
    defects.
    """
    job, judging = job or console.RunningJob(config.stage, config.kv.name), config.facts.judges
    if judging and not sweeping:
        summary.begin(config.work, sweep, [job.policy], command=next_steps.whole())
    code = DEFECT
    try:
        console.begin(job, config.model.path if config.facts.makes or config.facts.plans else None)
        with holding(config), required_libraries():
            STAGES[config.stage](Run(config, sweep, sweeping, job.policy))
        code = 0
    except Exception as error:
        code = exit_code(error)
        if isinstance(error, CannotBeJudged) and not sweeping:
            next_steps.show(next_steps.after_weak(config, error, next_steps.typed()))
        raise
    except (KeyboardInterrupt, SystemExit):
        code = INTERRUPTED
        raise
    finally:
        if judging:
            last = summary.finish(config.work, sweep, code, job.number)
            if not sweeping:
                write_junit(config.work / JUNIT, last)
                if not last.candidates:
                    remove_page(config.work)
        elif not sweeping and config.facts.recorded:
            summary.finish(config.work, None, code)
