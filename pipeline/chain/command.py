"""Runs the jobs of a command, then promotes a candidate or suggests the next step. Start reading here.

A job (`pipeline.chain.job`) calls the function of its stage (`pipeline.chain.stage_functions`). The stages up to evaluate make
the artifacts that they need, or reuse artifacts in the store. Promote, rollback and verify use the results of earlier commands.

checkpoint -> quantize -> export -> build -> evaluate against the FP16-KV engine -> promote
"""

import signal
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipeline.chain import stage_functions
from pipeline.chain.job import Run
from pipeline.chain.launchers import launch
from pipeline.chain.showing import show_page, show_results, warn_on_error
from pipeline.cli import console, next_steps
from pipeline.config.compose import Plan, to_config
from pipeline.config.config import Config
from pipeline.config.overrides import BASIC, LOGS
from pipeline.registry import summary
from pipeline.store.store import used
from stages.core.errors import (
    INTERRUPTED,
    SEVERITY,
    GateRefusal,
    MissingRequirement,
    Refusal,
    describe,
    exit_code,
    required_libraries,
)
from stages.core.redaction import redact_text
from stages.core.streams import redact_output, reserve_stdout
from stages.verdict.candidate import none_accepted


def unprunable(config: Config) -> AbstractContextManager[None]:
    """Prevent stage=prune from removing artifacts that a command uses while the block runs."""
    if config.facts.work != "used":
        return nullcontext()
    if config.facts.makes is not None:
        config.artifacts.mkdir(parents=True, exist_ok=True)
    return used(config.artifacts)


def run(planned: Plan, sweep: str) -> int:
    """Run the jobs of a command, show the candidates with the next step, and return the exit code.

    `sweep` is the id of the command's evaluations. An error of a job does not stop a sweep; a single job's error is raised.
    """
    config, sweeping = planned.jobs[0], planned.sweeping
    command = None if planned.arguments is None else next_steps.command_line(planned.arguments, sweep=sweeping)
    jobs = JobRunner(sweep, planned.names, planned.arguments or (), command, sweeping, planned.launcher != BASIC)
    with unprunable(config):  # held between the jobs of a sweep too
        code = 0
        try:
            if sweeping:
                code = _sweep(planned, jobs)
            else:
                jobs.run(0, config)
        except (KeyboardInterrupt, SystemExit) as error:  # Ray turns SIGTERM into SystemExit
            with warn_on_error("the interruption is not recorded"):
                _conclude(planned, jobs, INTERRUPTED)
            raise KeyboardInterrupt from error
        except Exception as error:  # from the only job, or from the launcher
            if sweeping:
                if not summary.has_begun(config.work, sweep):  # no job has started to judge: no sweep is recorded
                    raise
                console.ended_by(error)
                return _conclude(planned, jobs, exit_code(error))
            with warn_on_error("the end of the command is not recorded"):
                _conclude(planned, jobs, exit_code(error))
            raise
        return _conclude(planned, jobs, code)


@dataclass(frozen=True)
class JobEnd:
    code: int = 0
    message: str = ""


def _sweep(planned: Plan, jobs: "JobRunner") -> int:
    """Run the jobs of a sweep; return the worst exit code."""
    if planned.launcher == BASIC:
        ended = [jobs.attempt(number, config) for number, config in enumerate(planned.jobs)]
    else:
        has_logs = planned.launcher.startswith("submitit")  # their jobs write into files
        if has_logs:
            console.LOGGER.info("jobs write their output below %s", planned.jobs[0].work / LOGS)
        ended = launch(planned, jobs)
        if has_logs:
            for number, end in enumerate(ended):
                for line in end.message.splitlines():  # refusals, which the jobs wrote to their log files
                    console.error(f"{jobs.place(number, planned.jobs[number]).name}{line}", exit_code=end.code)
    return max((end.code for end in ended), key=SEVERITY.index)


@dataclass(frozen=True)
class JobRunner:
    """Runs the jobs of a command. A launcher calls it for each job, perhaps on another machine."""

    sweep: str
    names: tuple[str, ...]
    arguments: tuple[str, ...]
    """The arguments of the command, which a next command repeats."""
    command: str | None = None
    """The command line; None if kvgate was called from Python."""
    sweeping: bool = True
    concurrent: bool = True
    """Whether a launcher runs the jobs."""

    def __call__(self, composed: DictConfig) -> JobEnd:
        reserve_stdout()
        redact_output()
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # keep a handler that a cluster set
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        config = to_config(composed)
        console.configure(config.log)
        return self.attempt(HydraConfig.get().job.num, config)

    def place(self, number: int, config: Config) -> console.JobPlace:
        return console.JobPlace(config.stage, self.names[number], number + 1, len(self.names), self.concurrent)

    def begin(self, config: Config) -> None:
        if config.facts.judges:
            summary.begin(config.work, self.sweep, self.names, self.command)

    def run(self, number: int, config: Config) -> None:
        """Announce and run a job, and record its exit code if it judges.

        The exit code is recorded after the promotion, so a job that is killed while it promotes counts as unfinished.
        """
        code, message, label = 0, "", self.names[number]
        console.begin(self.place(number, config), config.model.path if config.facts.makes or config.facts.plans else None)
        try:
            with unprunable(config), required_libraries():
                run = Run(config, self.sweep, label, self.arguments)
                if config.facts.judges:
                    _ = run.registry  # opens the registry first: without a connection, no sweep is recorded
                self.begin(config)  # here, not before the launch, which may fail
                stage_functions.FUNCTIONS[config.stage](run)
                if config.facts.promotes and config.tracking.enabled and not self.sweeping:
                    _promote_passing(run)
        except BaseException as error:
            code = exit_code(error)
            message = "interrupted" if code == INTERRUPTED else redact_text(describe(error)).partition("\n")[0]
            raise
        finally:
            if config.facts.judges:
                with warn_on_error("the end of the job is not recorded"):  # a failure here must not replace the job's error
                    summary.finish(config.work, self.sweep, code, number + 1, message)

    def attempt(self, number: int, config: Config) -> JobEnd:
        """Run a job of a sweep, print its error, and return how it ended."""
        try:
            self.run(number, config)
        except Exception as error:
            console.ended_by(error)
            return JobEnd(exit_code(error), redact_text(describe(error)))
        finally:
            console.end()
        return JobEnd()


def _promote_passing(run: Run) -> None:
    last = summary.load(run.config.work, run.sweep)
    if last.candidates[0].verdict == "PASS":
        with console.silent():  # if the promotion is killed, this page remains
            show_page(run.config, last.candidates, last)
        stage_functions.promote_from(run, last)


def _conclude(planned: Plan, jobs: JobRunner, code: int) -> int:
    """Show the results of a command with the next step, and return the command's exit code.

    `code` is the worst exit code of the jobs, or of the error that ended the command early. Raises GateRefusal if the candidate
    of the only job did not pass; a sweep prints its refusal.
    """
    config, sweeping = planned.jobs[0], planned.sweeping
    if not config.facts.judges:
        return code
    began = summary.has_begun(config.work, jobs.sweep)
    jobs.begin(config)  # an error may have come before any job
    last = summary.load(config.work, jobs.sweep)
    if sweeping or not config.facts.promotes:  # another command's move: this command has shown no report yet
        last = last.model_copy(update={"champion": None})
    candidates = last.candidates
    assert candidates or sweeping or code, "a job that ends well records its candidate"
    judged = candidates if sweeping or code == 0 else ()
    unfinished = last.unfinished if sweeping else None
    verdicts = [(candidate.name, candidate.verdict, candidate.checks) for candidate in judged]
    reason = none_accepted(verdicts, planned.accepted, sweeping=sweeping)
    refusal: Refusal | None = None if reason is None else GateRefusal(reason)
    if unfinished is not None:
        refusal = MissingRequirement(f"{unfinished}; run it again to continue")
    refused = () if refusal is None else (exit_code(refusal),)
    code = max((code, *refused, *last.exit_codes.values()), key=SEVERITY.index)
    summary.write_junit(config.work, last.model_copy(update={"exit_code": code}), planned.accepted)
    show_results(config, candidates, last, began=began, compares=sweeping)
    if judged and last.champion is None:
        swept = planned.swept_keys
        next_steps.after_judging(config, judged, jobs.arguments, swept=swept, unfinished=unfinished is not None).show()
    only_job = {} if sweeping else {"exit_codes": {1: code}}  # the jobs of a sweep have recorded theirs
    summary.note(config.work, last.sweep, exit_code=code, **only_job)
    if refusal is not None:
        if not sweeping:
            raise refusal
        console.ended_by(refusal)
    return code
