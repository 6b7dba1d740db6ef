"""Runs the stage of one job: STAGES maps its name to its function. Start reading here.

The stages up to evaluate make the artifacts that they need, or reuse those in the store. Promote, rollback and verify work
on what earlier commands left.

checkpoint -> quantize -> export -> build -> evaluate against the FP16-KV engine -> promote
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.markup import escape

from pipeline.artifacts.files import store_of
from pipeline.artifacts.store import Store, used
from pipeline.config.config import Config
from pipeline.core.errors import DEFECT, EXIT_CODES, INTERRUPTED, GateRefusal, exit_code
from pipeline.registry import summary
from pipeline.registry.proof import PASS
from pipeline.registry.runs import open_store, track
from pipeline.registry.summary import Candidate, Cited
from pipeline.run import planning
from pipeline.run.identity import IDENTITY_FILE, read_identity
from pipeline.run.inputs import UNRECORDED, WITHOUT_CHECKPOINT
from pipeline.run.job import Run
from pipeline.run.loading import plots, required_libraries
from pipeline.run.served import open_chain
from pipeline.run.serving import monitor, promote, promote_from, rollback, route, show, verify
from pipeline.run.tuning import tune
from pipeline.terminal import console, next_steps, tables
from pipeline.terminal.junit import JUNIT, write_junit
from pipeline.terminal.tables import REPORT
from pipeline.upkeep.stages import prune, show_status
from pipeline.verdict.report import REPORT_FILE, SampleRow, load_report, load_rows
from pipeline.verdict.tracked import flat_metrics

GATE_EXIT = EXIT_CODES[GateRefusal]


def quantize(run: Run) -> None:
    """Quantize the checkpoint's weights, measure the cache's static scales, and write ModelOpt's exports."""
    quantized, exports = run.chain.quantized(run.config.kv), run.chain.exports(run.config.kv)
    lines = f"quantized checkpoint: {quantized.path}", f"ModelOpt's exports: {exports.path}"
    console.result("quantized", *lines, paste=True, checkpoint=quantized.path, exports=exports.path)
    if not run.sweeping:
        next_steps.show(next_steps.after_quantize(next_steps.typed()))


def build(run: Run) -> None:
    """Build the engine bundle."""
    bundle = run.chain.bundle(run.config.kv)
    lines = f"engine bundle: {bundle.path}", f"digest: {bundle.digest}"
    console.result("engine", *lines, paste=True, bundle=bundle.path, digest=bundle.digest)
    for line in run.chain.backend.describe(bundle.path):
        console.say(line)
    hint = run.chain.onnx_report(run.config.kv)
    if hint is not None:
        console.say(escape(hint))
    if not run.sweeping:
        next_steps.show(next_steps.after_build(next_steps.typed()))


def evaluate(run: Run) -> None:
    """Judge the engine against the FP16-KV engine and register it.

    Raises:
        GateRefusal: when it did not pass; not in a sweep, where `conclude_sweep` decides once all candidates are judged.
    """
    config, chain = run.config, run.chain
    with console.doing("opening MLflow"):
        store = open_store(config.tracking, config.work, config.model.label)
    with track(store, run.sweep, run.label, config.backend.name, config.model_dump(mode="json", exclude={"log"})) as tracked:
        evaluation, engine, baseline = chain.evaluation(config.kv)
        report, rows = load_report(evaluation.path), load_rows(evaluation.path)
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
        with TemporaryDirectory() as scratch, console.doing("registering the engine"):
            files = _sample_plots(candidate.name, rows, Path(scratch))
            candidate = tracked.conclude(candidate, [row.model_dump() for row in rows], files)
    summary.record(config.work, run.sweep, candidate)
    tables.print_verdict(candidate)
    tables.print_conformance(verdict)
    tables.print_evidence(report, verdict)
    if not run.sweeping:
        tables.print_baseline_accuracy([candidate])
        show(config, [candidate], lambda: store, sweep=run.sweep)
        promotes = config.stage == "all" and config.tracking.enabled
        next_steps.show(next_steps.after_judging(config, [candidate], next_steps.typed(), promotes=promotes))
    if candidate.verdict != PASS and not run.sweeping:
        raise GateRefusal(f"{candidate.name} is not good enough: {candidate.verdict}")


def _sample_plots(name: str, rows: list[SampleRow], folder: Path) -> list[Path]:
    with required_libraries():
        return [
            plots().kl_by_context(rows, name, folder / "kl_by_context.png"),
            plots().flips_by_workload(rows, name, folder / "flips_by_workload.png"),
        ]


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
    "status": lambda run: show_status(run.config, read_identity, as_json=run.as_json),
    "prune": lambda run: prune(run.config, read_identity),
}


JUDGING_STAGES = ("evaluate", "all")
MAKING_STAGES = ("quantize", "build", "tune", *JUDGING_STAGES)
"""Stages that make artifacts."""


def holding(config: Config) -> AbstractContextManager[None]:
    """Keep stage=prune from the artifacts that a command uses, while its block runs."""
    if config.stage in ("status", "prune"):  # one looks alone, the other holds them for itself
        return nullcontext()
    root = config.work / "artifacts"
    if config.stage == "verify":  # it may be of another work directory, or of none
        found = store_of(Path(str(config.bundle)).resolve() / "bundle.json")
        return used(found, make=False) if found is not None else nullcontext()
    return used(root, make=config.stage in MAKING_STAGES or root.is_dir())


def run(
    config: Config,
    sweep: str,
    sweeping: bool,
    changed: Sequence[str],
    number: int = 1,
    of: int = 1,
    *,
    as_json: bool = False,
) -> None:
    """Run one job and record in summary.json how it ended.

    Args:
        config: The job's configuration.
        sweep: Id of the command that the job belongs to.
        sweeping: Whether that command has several jobs.
        changed: Overrides that belong to the candidate's display name.
        number: Of the job among those of the command, from 1.
        of: How many jobs the command has.
        as_json: Whether stage=status prints one JSON document.

    Raises:
        UserError, GateRefusal, MissingRequirement: what a person or CI can act on; any other exception is a defect.
    """
    label = " ".join([config.kv.name, *changed])
    job = Run(config, open_chain(config, Store(config.work / "artifacts")), sweep, sweeping, label, as_json)
    if config.stage in JUDGING_STAGES and not sweeping:
        summary.begin(config.work, sweep, 1)
    code = DEFECT
    try:
        about = None if config.stage in WITHOUT_CHECKPOINT else f" of {config.model.path}"
        console.begin(console.Job(config.stage, label, number, of), about)
        with holding(config):
            STAGES[config.stage](job)
        code = 0
    except Exception as error:
        code = exit_code(error)
        raise
    except (KeyboardInterrupt, SystemExit):
        code = INTERRUPTED
        raise
    finally:
        # Only an evaluation begins or joins a sweep: other stages leave the last sweep's candidates.
        if config.stage not in UNRECORDED:
            last = summary.finish(config.work, sweep if config.stage in JUDGING_STAGES else None, code)
            if config.stage in JUDGING_STAGES and not sweeping:
                write_junit(config.work / JUNIT, last)


def begin_sweep(config: Config, sweep: str, jobs: int) -> None:
    """Note how many jobs a sweep has, before the first of them runs."""
    if config.stage in JUDGING_STAGES:
        summary.begin(config.work, sweep, jobs)


def conclude_sweep(config: Config, sweep: str, base: Sequence[str], swept: Sequence[str]) -> int:
    """Print the comparison of a sweep's candidates and return the sweep's exit code.

    It is the worst of its jobs' codes; if all of them ended well, it says whether any candidate passed.

    Args:
        config: Of its first job.
        sweep: Its id.
        base: What was typed.
        swept: Keys that differ between its jobs.
    """
    if config.stage not in JUDGING_STAGES:
        if config.stage == "build":
            next_steps.show(next_steps.after_build(base, sweep=True))
        return 0
    last = summary.load(config.work, sweep)
    write_junit(config.work / JUNIT, last)
    if not last.candidates:
        return last.exit_code or (0 if last.ended else DEFECT)
    with console.written_to(config.work / REPORT):
        tables.print_occasion()
        tables.print_comparison(last.candidates)
        tables.print_baseline_accuracy(last.candidates)
    show(
        config,
        last.candidates,
        lambda: open_store(config.tracking, config.work, config.model.label),
        sweep=sweep,
        unfinished=last.unfinished,
    )
    unfinished = last.unfinished is not None
    next_steps.show(next_steps.after_judging(config, last.candidates, base, swept=swept, unfinished=unfinished))
    passed = any(candidate.verdict == PASS for candidate in last.candidates)
    if not passed:
        summary.fail(config.work, sweep, GATE_EXIT)
        console.error("no candidate of the sweep passed", exit_code=GATE_EXIT)
    return last.exit_code or (0 if passed else GATE_EXIT)
