"""The stages that make an engine and judge it: quantize, build, evaluate."""

from contextlib import nullcontext

from pipeline.chain.job import Run, open_store
from pipeline.chain.serving import promote_from
from pipeline.chain.showing import show
from pipeline.cli import commands, console, next_steps, tables
from pipeline.evidence.identity import IDENTITY_FILE, read_identity
from pipeline.evidence.reading import judged_candidate
from pipeline.registry import summary
from pipeline.registry.promotion import PASS
from stages.core.errors import GateRefusal
from stages.verdict.candidate import Cited, not_passed
from stages.verdict.gates import decide
from stages.verdict.report import load_report, load_rows


def quantize(run: Run) -> None:
    exports = run.chain.exports(run.config.kv)
    checkpoint = exports.path / "checkpoint"
    lines = f"quantized checkpoint: {checkpoint}", f"with the cache's scales and ModelOpt's exports: {exports.path}"
    console.result("quantized", *lines, paste=True, checkpoint=checkpoint, exports=exports.path)
    if not run.sweeping:
        next_steps.show(next_steps.after_making("quantize", commands.typed()))


def build(run: Run) -> None:
    bundle = run.chain.bundle(run.config.kv)
    lines = f"engine bundle: {bundle.path}", f"digest: {bundle.digest}"
    console.result("engine", *lines, paste=True, bundle=bundle.path, digest=bundle.digest)
    for line in run.chain.backend.describe(bundle.path):
        console.say(line)
    if not run.sweeping:
        next_steps.show(next_steps.after_making("build", commands.typed()))


def evaluate(run: Run) -> None:
    """Judge the engine against the FP16-KV engine and register it; with stage=all, promote it if it passed.

    Jobs of a sweep only register. Otherwise the job that finishes last would be promoted.
    """
    config, chain = run.config, run.chain
    with console.doing("opening MLflow"):
        store = open_store(config.tracking, config.work, config.model.label)
    whole = config.model_dump(mode="json", exclude={"log", "dry"})
    recorded = nullcontext("") if store is None else store.candidate(run.sweep, run.label, config.backend.name, whole)
    with recorded as run_id:
        evaluation = chain.evaluation(config.kv)
        report, rows = load_report(evaluation.path), load_rows(evaluation.path)
        with console.doing("deciding"):
            verdict = decide(report, rows, config.gates)
        sealed = chain.identity(evaluation, report, verdict)
        cited = Cited(path=sealed.path / IDENTITY_FILE, digest=sealed.files[IDENTITY_FILE])
        candidate = judged_candidate(read_identity(cited.path), cited, report, chain.store.root)
        candidate = candidate.model_copy(update={"name": run.label})
        if store is not None:
            with console.doing("registering the engine"):
                candidate = store.conclude(run_id, candidate, rows)
    last = summary.record(config.work, run.sweep, candidate)
    look = next_steps.is_look(commands.typed()) and candidate.verdict == "INCONCLUSIVE"
    tables.print_verdict(candidate, look=look)
    if run.sweeping:
        return
    promotes = config.stage == "all" and config.tracking.enabled
    show(config, [candidate], sweep=run.sweep, command=commands.whole())
    if not (promotes and candidate.verdict == PASS):  # a promotion prints its own next step
        asking = sum(artifact.seconds for _, artifact in chain.finished if artifact.stage in ("baseline", "round"))
        next_steps.show(next_steps.after_judging(config, [candidate], commands.typed(), asking_s=asking))
    if candidate.verdict != PASS and not look:
        raise GateRefusal(not_passed(candidate.name, candidate.verdict, candidate.checks))
    if promotes:
        promote_from(run, last)
