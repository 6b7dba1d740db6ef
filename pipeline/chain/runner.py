"""Runs a command: its jobs, then the promotion or the next step that their verdicts call for. Start reading here.

STAGES maps a stage to its function. The stages up to evaluate make the artifacts that they need, or reuse artifacts in the
store. Promote, rollback and verify use the results of earlier commands.

checkpoint -> quantize -> export -> build -> evaluate against the FP16-KV engine -> promote
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipeline.chain import serving
from pipeline.chain.launching import LauncherRefusal, launch, start
from pipeline.chain.planning import recommend_policy, show_capacity, tune
from pipeline.chain.run import Run, open_store
from pipeline.chain.showing import compare_in_mlflow, remove_page, show_page, warned
from pipeline.cli import console, next_steps, tables
from pipeline.cli.junit import JUNIT, write_junit
from pipeline.cli.next_steps import NextStep
from pipeline.cli.prune import prune
from pipeline.cli.status import show_status
from pipeline.config.compose import Plan, to_config
from pipeline.config.config import Config
from pipeline.config.launchers import BASIC, LOGS
from pipeline.evidence.identity import IDENTITY_FILE, read_identity
from pipeline.evidence.reading import bundle_directory, judged_candidate
from pipeline.loading import required_libraries
from pipeline.registry import summary
from pipeline.store.store import used
from stages.core.errors import (
    INTERRUPTED,
    SEVERITY,
    CannotBeJudged,
    GateRefusal,
    MissingRequirement,
    describe,
    exit_code,
)
from stages.core.files import store_of
from stages.core.redaction import redact_output, redact_text, reserve_stdout
from stages.engines.bundle import BUNDLE_FILE
from stages.verdict.candidate import Cited, not_passed
from stages.verdict.gates import decide
from stages.verdict.report import load_report, load_rows


def quantize(run: Run) -> None:
    exports = run.engine_steps.exports(run.config.kv)
    checkpoint = exports.path / "checkpoint"
    lines = f"quantized checkpoint: {checkpoint}", f"with the cache's scales and ModelOpt's exports: {exports.path}"
    console.result("quantized", *lines, paste=True, checkpoint=checkpoint, exports=exports.path)


def build(run: Run) -> None:
    bundle = run.engine_steps.bundle(run.config.kv)
    lines = f"engine bundle: {bundle.path}", f"digest: {bundle.digest}"
    console.result("engine", *lines, paste=True, bundle=bundle.path, digest=bundle.digest)


def evaluate(run: Run) -> None:
    """Judge the engine against the FP16-KV engine, and register it."""
    config, steps = run.config, run.verdict_steps
    with console.progress("opening MLflow"):
        store = open_store(config.tracking, config.work, config.model.label)
    whole = config.model_dump(mode="json", exclude={"log", "dry"})
    recorded = nullcontext("") if store is None else store.candidate(run.sweep, run.label, config.backend.name, whole)
    with recorded as run_id:
        evaluation = steps.report()
        report, rows = load_report(evaluation.path), load_rows(evaluation.path)
        with console.progress("deciding"):
            verdict = decide(report, rows, config.gates)
        sealed = steps.identity(evaluation, verdict)
        cited = Cited(path=sealed.path / IDENTITY_FILE, digest=sealed.files[IDENTITY_FILE])
        candidate = judged_candidate(read_identity(cited.path), cited, report, run.engine_steps.store.root)
        candidate = candidate.model_copy(update={"name": run.label})
        if store is not None:
            with console.progress("registering the engine"):
                candidate = store.register(run_id, candidate, rows)
    summary.record(config.work, run.sweep, candidate)
    tables.print_verdict(candidate, first_look=config.workloads.is_first_look)


STAGES: dict[str, Callable[[Run], None]] = {
    "quantize": quantize,
    "build": build,
    "evaluate": evaluate,
    "all": evaluate,
    "tune": tune,
    **serving.STAGES,
    "capacity": show_capacity,
    "recommend": recommend_policy,
    "status": lambda run: show_status(run.config),
    "prune": lambda run: prune(run.config),
}


def holding(config: Config) -> AbstractContextManager[None]:
    """Prevent stage=prune from removing artifacts that a command uses while the block runs."""
    if config.stage in ("status", "prune", "audit"):  # status and audit only read; prune takes its own lock
        return nullcontext()
    root = config.artifacts
    if config.stage == "verify":  # the bundle may be outside of any work directory
        store = store_of(bundle_directory(str(config.bundle)).resolve() / BUNDLE_FILE)
        return used(store, make=False) if store is not None else nullcontext()
    return used(root, make=config.facts.makes or root.is_dir())


def run(planned: Plan, sweep: str) -> int:
    """Run the jobs of a command, show the candidates with the next step, and return the exit code.

    `sweep` is the id of the command's evaluations. An error of a job does not stop a sweep.

    Raises:
        UserError, GateRefusal, MissingRequirement: The only job ended with a problem that a person or CI can act on.
        Exception: A defect.
    """
    config, arguments, sweeping = planned.jobs[0], planned.arguments, planned.sweeping
    with holding(config):  # held between the jobs of a sweep too
        start(planned)
        before = None
        if config.facts.judges:  # recorded before any job starts, because jobs may run in other processes
            command = None if arguments is None else next_steps.command_line(arguments, sweep=sweeping)
            before = summary.begin(config.work, sweep, planned.names, command=command)
        code, step = 0, None
        try:
            if sweeping:
                code, step = _sweep(planned, sweep)
            else:
                _run_alone(Run(config, sweep, planned.names[0], arguments or ()))
        except (KeyboardInterrupt, SystemExit) as error:  # Ray makes a SystemExit of SIGTERM
            with warned("the interruption is not recorded"):
                _conclude(planned, sweep, INTERRUPTED)
            raise KeyboardInterrupt from error
        except LauncherRefusal:
            if config.facts.judges:
                with warned(f"{summary.FILE} of the last command is not restored"):
                    summary.forget(config.work, sweep, before)
            raise
        except Exception as error:  # from the only job, or from the launcher
            if sweeping:
                console.ended_by(error)
                return _conclude(planned, sweep, exit_code(error))
            with warned("the end of the command is not recorded"):
                _conclude(planned, sweep, exit_code(error), _advice(config, error, arguments or ()))
            raise
        return _conclude(planned, sweep, code, step)


def _run_alone(job: Run) -> None:
    """Run the only job of a command. stage=all promotes its candidate if it passed; a killed promotion is an unfinished job."""
    config = job.config
    with _recorded(config, job.sweep, console.RunningJob(config.stage, job.label)):
        STAGES[config.stage](job)
        if config.stage == "all" and config.tracking.enabled:
            last = summary.load(config.work, job.sweep)
            if last.candidates[0].verdict == "PASS":
                with console.silent():  # a killed promotion leaves the page of its candidate
                    show_page(config, last.candidates, sweep=job.sweep, command=last.command)
                serving.promote_from(job, last)


def _advice(config: Config, error: Exception, arguments: Sequence[str], *, sweep: bool = False) -> NextStep | None:
    """Return the next step after the error of a job; None if the error calls for no command."""
    return next_steps.after_weak(config, error, arguments, sweep=sweep) if isinstance(error, CannotBeJudged) else None


@contextmanager
def _recorded(config: Config, sweep: str, job: console.RunningJob) -> Iterator[None]:
    """Announce a job, and record the exit code of a job that judges in summary.json."""
    console.begin(job, config.model.path if config.facts.makes or config.facts.plans else None)
    try:
        with holding(config), required_libraries():
            yield
    except BaseException as error:
        if config.facts.judges:
            with warned("the end of the job is not recorded"):  # a failure here must not replace the job's error
                summary.finish(config.work, sweep, exit_code(error), job.number)
        raise
    if config.facts.judges:
        summary.finish(config.work, sweep, 0, job.number)


@dataclass(frozen=True)
class Ended:
    """End of a sweep's job."""

    code: int
    message: str = ""
    """Message of the error."""
    step: NextStep | None = None
    """Next step after the error."""


def _sweep(planned: Plan, sweep: str) -> tuple[int, NextStep | None]:
    """Run the jobs of a sweep, in this process or with a launcher.

    Return the worst exit code, and the next step after the first error that calls for one.
    """
    task = Task(sweep, planned.names, tuple(planned.arguments or ()))
    if planned.launcher == BASIC:
        ended = [task.attempt(number, config) for number, config in enumerate(planned.jobs)]
    else:
        has_logs = planned.launcher.startswith("submitit")  # their jobs write into files
        if has_logs:
            console.LOGGER.info("jobs write their output below %s", planned.jobs[0].work / LOGS)
        ended = launch(planned, task)
        for number, end in enumerate(ended) if has_logs else ():
            for line in end.message.splitlines():  # refusals, which the jobs wrote to their log files
                console.error(f"{task.place(number, planned.jobs[number]).name}{line}", exit_code=end.code)
    step = next((end.step for end in ended if end.step is not None), None)
    return max((end.code for end in ended), key=SEVERITY.index), step


@dataclass(frozen=True)
class Task:
    """Callable that a launcher runs for a job, perhaps on another machine. The configuration is composed there."""

    sweep: str
    names: tuple[str, ...]
    """Display names of all jobs."""
    arguments: tuple[str, ...]
    """The arguments of the sweep's command, which a next command repeats."""

    def __call__(self, composed: DictConfig) -> Ended:
        """Run the job of a composed configuration."""
        reserve_stdout()
        redact_output()
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # keep a handler that a cluster set
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        config = to_config(composed)
        console.configure(config.log)
        return self.attempt(HydraConfig.get().job.num, config, beside_others=True)

    def place(self, number: int, config: Config, *, beside_others: bool = False) -> console.RunningJob:
        """Return the description of a job, by its number from 0."""
        return console.RunningJob(config.stage, self.names[number], number + 1, len(self.names), beside_others=beside_others)

    def attempt(self, number: int, config: Config, *, beside_others: bool = False) -> Ended:
        """Run a job of the sweep, and return how it ended."""
        try:
            with _recorded(config, self.sweep, self.place(number, config, beside_others=beside_others)):
                STAGES[config.stage](Run(config, self.sweep, self.names[number], self.arguments))
        except Exception as error:
            console.ended_by(error)
            return Ended(exit_code(error), redact_text(describe(error)), _advice(config, error, self.arguments, sweep=True))
        finally:
            console.end()
        return Ended(0)


def _conclude(planned: Plan, sweep: str, code: int, step: NextStep | None = None) -> int:
    """Show the results of a command with the next step, and return the command's exit code.

    `code` is the worst exit code of the jobs, or of the error that ended the command early. `step` is the next step after an
    error, which is shown if there are no candidates.

    Raises:
        GateRefusal: The candidate of the only job did not pass. A sweep prints its refusal.
    """
    config = planned.jobs[0]
    if config.facts.judges:
        last = summary.load(config.work, sweep)
        write_junit(config.work / JUNIT, last)
        return (_conclude_sweep if planned.sweeping else _conclude_job)(planned, last, code, step)
    if config.stage in ("quantize", "build") and code == 0:
        step = next_steps.after_making(config.stage, planned.arguments or (), sweep=planned.sweeping)
    next_steps.show(step)
    if config.facts.recorded:
        summary.finish(config.work, None, code)
    return code


def _conclude_job(planned: Plan, last: summary.Summary, code: int, step: NextStep | None) -> int:
    """Conclude an evaluation as `_conclude` does. Raises GateRefusal if its candidate did not pass."""
    config, refusal = planned.jobs[0], None
    if code == 0:
        candidate, *_ = last.candidates  # the sweep of a job that Python ran may have had others
        step = next_steps.after_judging(config, last.candidates, planned.arguments or ())
        if candidate.verdict not in planned.accepted:
            refusal = GateRefusal(not_passed(candidate.name, candidate.verdict, candidate.checks))
    if last.champion is None:  # else the promotion has shown the candidate
        _show_candidates(config, last)
        next_steps.show(step)
    code = max(code, last.exit_code, 0 if refusal is None else exit_code(refusal), key=SEVERITY.index)
    summary.finish(config.work, last.sweep, code)
    if refusal is not None:
        raise refusal
    return code


def _conclude_sweep(planned: Plan, last: summary.Summary, code: int, step: NextStep | None) -> int:
    """Conclude a sweep as `_conclude` does, and print why it does not exit with 0 although its jobs ended well."""
    config, candidates = planned.jobs[0], last.candidates
    refusal: Exception | None = None
    if candidates:
        tables.print_comparison(candidates)
    _show_candidates(config, last)
    if candidates:
        compare_in_mlflow(config, candidates, last.sweep)
        swept, unfinished = planned.swept_keys, last.unfinished is not None
        step = next_steps.after_judging(config, candidates, planned.arguments or (), swept=swept, unfinished=unfinished)
    next_steps.show(step)
    if last.unfinished is not None:
        refusal = MissingRequirement(f"{last.unfinished}; run it again to continue")
    elif candidates and planned.accepted.isdisjoint(candidate.verdict for candidate in candidates):
        refusal = GateRefusal("no candidate of the sweep passed")
    code = max(code, last.exit_code, 0 if refusal is None else exit_code(refusal), key=SEVERITY.index)
    summary.note(config.work, last.sweep, exit_code=code)
    if refusal is not None:
        console.ended_by(refusal)
    return code


def _show_candidates(config: Config, last: summary.Summary) -> None:
    """Write the page about the candidates of a command, or remove an earlier command's page if there are none."""
    if last.candidates:
        show_page(config, last.candidates, sweep=last.sweep, unfinished=last.unfinished, command=last.command)
    else:
        remove_page(config.work)
