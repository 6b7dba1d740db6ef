"""The functions of the stages, and the checks that single stages need. `pipeline.config.stages` declares the stages."""

from collections.abc import Callable
from contextlib import nullcontext

from pipeline.chain import serving
from pipeline.chain.job_run import Run, open_store
from pipeline.chain.planning import recommend_policy, show_capacity, tune
from pipeline.cli import console, tables
from pipeline.cli.progress import show_progress
from pipeline.cli.prune import prune
from pipeline.cli.status import show_status
from pipeline.config.config import Config
from pipeline.config.stages import Stage
from pipeline.evidence.identity import IDENTITY_FILE, read_identity
from pipeline.evidence.reading import bundle_directory, judged_candidate
from pipeline.loading import open_backend
from pipeline.registry import summary
from pipeline.registry.monitors import read_snapshot
from stages.checkpoints.places import locate_checkpoint
from stages.verdict.candidate import Cited
from stages.verdict.gates import decide
from stages.verdict.report import load_report, load_rows


def quantize(run: Run) -> None:
    exports = run.make()
    checkpoint = exports.path / "checkpoint"
    lines = f"quantized checkpoint: {checkpoint}", f"with the cache's scales and ModelOpt's exports: {exports.path}"
    console.result("quantized", *lines, paste=True, checkpoint=checkpoint, exports=exports.path)


def build(run: Run) -> None:
    bundle = run.make()
    lines = f"engine bundle: {bundle.path}", f"digest: {bundle.digest}"
    console.result("engine", *lines, paste=True, bundle=bundle.path, digest=bundle.digest)


def evaluate(run: Run) -> None:
    """Judge the engine against the FP16-KV engine, and register it."""
    config, steps = run.config, run.verdict_steps
    with show_progress("opening MLflow"):
        store = open_store(config.tracking, config.work, config.model.label)
    whole = config.model_dump(mode="json", exclude={"log", "dry"})
    recorded = nullcontext("") if store is None else store.candidate(run.sweep, run.label, config.backend.name, whole)
    with recorded as run_id:
        evaluation = steps.report()
        report, rows = load_report(evaluation.path), load_rows(evaluation.path)
        with show_progress("deciding"):
            verdict = decide(report, rows, config.gates)
        sealed = steps.identity(evaluation, verdict)
        cited = Cited(path=sealed.path / IDENTITY_FILE, digest=sealed.files[IDENTITY_FILE])
        candidate = judged_candidate(read_identity(cited.path), cited, report, run.engine_steps.store.root)
        candidate = candidate.model_copy(update={"name": run.label})
        if store is not None:
            with show_progress("registering the engine"):
                candidate = store.register(run_id, candidate, rows)
    summary.record(config.work, run.sweep, candidate)
    tables.print_verdict(candidate, quick_check=config.workloads.is_quick_check)


ACTIONS: dict[Stage, Callable[[Run], None]] = {
    "quantize": quantize,
    "build": build,
    "evaluate": evaluate,
    "all": evaluate,
    "tune": tune,
    "promote": serving.promote,
    "rollback": serving.rollback,
    "verify": serving.verify,
    "audit": serving.audit,
    "route": serving.route,
    "monitor": serving.monitor,
    "capacity": show_capacity,
    "recommend": recommend_policy,
    "status": lambda run: show_status(run.config),
    "prune": lambda run: prune(run.config),
}

CHECKS: dict[Stage, Callable[[Config], object]] = {
    "verify": lambda config: bundle_directory(str(config.bundle)),
    "monitor": lambda config: read_snapshot(config.monitor),
}
"""Checks of the inputs that only one stage has."""

CHECKS_AHEAD: dict[Stage, Callable[[Config], object]] = {
    "promote": serving.promotable,
    "audit": lambda config: open_backend(config.backend).audit(locate_checkpoint(config.model.path)),
}
"""Checks with which a dry run foresees a refusal. The stage itself repeats them."""
