"""The jobs of a command, in this process or in processes of a Hydra launcher, and the command's exit code."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipeline.chain.runner import holding, run
from pipeline.chain.showing import compare_in_mlflow, remove_page, show
from pipeline.cli import console, next_steps, tables
from pipeline.cli.junit import JUNIT, write_junit
from pipeline.cli.next_steps import NextStep
from pipeline.config.compose import Plan, launch, to_config
from pipeline.config.config import Config
from pipeline.config.launchers import BASIC, LOGS, end_workers, finish, start
from pipeline.registry import summary
from stages.core.errors import (
    EXIT_CODES,
    INTERRUPTED,
    SEVERITY,
    CannotBeJudged,
    GateRefusal,
    MissingRequirement,
    describe,
    exit_code,
)
from stages.core.redaction import redact_output, redact_text

GATE_EXIT = EXIT_CODES[GateRefusal]
UNFINISHED_EXIT = EXIT_CODES[MissingRequirement]
"""Exit code of a sweep with jobs that neither ended nor were interrupted: a machine killed them."""


@dataclass(frozen=True)
class Ended:
    code: int
    said: str = ""
    step: NextStep | None = None
    """Next step that follows from the error."""


@dataclass(frozen=True)
class Task:
    """Callable that a launcher runs for a job, perhaps on another machine. The configuration is composed there."""

    sweep: str
    names: tuple[str, ...]
    """Display names of all jobs."""
    typed: tuple[str, ...]
    """The arguments of the sweep's command, which a next command repeats."""

    def __call__(self, composed: DictConfig) -> Ended:
        """Run the job of a composed configuration."""
        redact_output()
        next_steps.remember(self.typed)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # keep a handler that a cluster set
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        number, config = HydraConfig.get().job.num, to_config(composed)
        console.configure(config.log)
        job = console.RunningJob(config.stage, self.names[number], number + 1, len(self.names), beside_others=True)
        return _attempt(config, self.sweep, job)


def _attempt(config: Config, sweep: str, job: console.RunningJob) -> Ended:
    """Run a job of a sweep and return how it ended. An error does not stop a sweep."""
    try:
        run(config, sweep, job, sweeping=True)
    except Exception as error:
        step = None
        if isinstance(error, CannotBeJudged):
            step = next_steps.after_weak(config, error, next_steps.typed(), sweep=True)
        console.ended_by(error)
        return Ended(exit_code(error), redact_text(describe(error)), step)
    finally:
        console.end()
    return Ended(0)


def sweep(planned: Plan, name: str) -> int:
    """Run a sweep's jobs and return its exit code. `name` is the sweep's id."""
    with holding(planned.jobs[0]):  # held between jobs too
        return _sweep(planned, name)


def _sweep(planned: Plan, sweep: str) -> int:
    first, launcher = planned.jobs[0], planned.launcher
    has_logs = launcher.startswith("submitit")  # their jobs write into files
    with console.progress(f"starting {launcher}"):
        more = start(launcher, planned.launcher_config)
    if first.facts.judges:  # recorded before any job starts, because jobs may run in other processes
        summary.begin(first.work, sweep, planned.names, command=next_steps.whole(sweep=True))
    if has_logs:
        console.LOGGER.info("jobs write their output below %s", first.work / LOGS)
    try:
        if launcher == BASIC:
            jobs = enumerate(zip(planned.jobs, planned.names, strict=True), start=1)
            ended = [_attempt(one, sweep, console.RunningJob(one.stage, name, n, len(planned.jobs))) for n, (one, name) in jobs]
        else:
            ended = launch(planned, more, Task(sweep, planned.names, tuple(next_steps.typed())))
            finish()
    except (KeyboardInterrupt, SystemExit) as error:  # Ray makes a SystemExit of SIGTERM
        end_workers()
        _conclude(planned, sweep, [INTERRUPTED])
        raise KeyboardInterrupt from error
    except Exception as error:  # raised by the launcher: jobs return their errors
        end_workers()
        console.ended_by(error)
        return _conclude(planned, sweep, [exit_code(error)])
    for number, (job, name) in enumerate(zip(ended, planned.names, strict=True), start=1) if has_logs else ():
        place = console.RunningJob(first.stage, name, number, len(ended)).name
        for line in job.said.splitlines():  # refusals, which the jobs wrote to their log files
            console.error(f"{place}{line}", exit_code=job.code)
    step = next((one.step for one in ended if one.step is not None), None)
    return _conclude(planned, sweep, [one.code for one in ended], step)


def _conclude(planned: Plan, sweep: str, codes: Sequence[int], step: NextStep | None = None) -> int:
    """Print the comparison of a sweep's candidates and return the sweep's exit code.

    The result is the worst of `codes` and the recorded exit codes of the jobs. If all are 0, it tells whether a candidate
    passed. `codes` are of the jobs, or of the error that ended the sweep early. `step` is the next step after a refusal.
    """
    config, typed = planned.jobs[0], next_steps.typed()
    if not config.facts.judges:
        if step is None and config.stage in ("quantize", "build"):
            step = next_steps.after_making(config.stage, typed, sweep=True)
        if step is not None:
            next_steps.show(step)
        worst = max(codes, key=SEVERITY.index)
        if config.facts.recorded:
            summary.finish(config.work, None, worst)
        return worst
    last = summary.load(config.work, sweep)
    codes = [*codes, last.exit_code]
    write_junit(config.work / JUNIT, last)
    if last.candidates:
        tables.print_comparison(last.candidates)
        show(config, last.candidates, sweep=sweep, unfinished=last.unfinished, command=last.command)
        compare_in_mlflow(config, last.candidates, sweep)
        unfinished = last.unfinished is not None
        step = next_steps.after_judging(config, last.candidates, typed, swept=planned.swept, unfinished=unfinished)
    else:
        remove_page(config.work)
    if step is not None:
        next_steps.show(step)
    decent = ("PASS", "INCONCLUSIVE") if next_steps.is_look(typed) else ("PASS",)
    if last.unfinished is not None:
        console.error(f"{last.unfinished}; run it again to continue", exit_code=UNFINISHED_EXIT)
        codes.append(UNFINISHED_EXIT)
    elif last.candidates and not any(candidate.verdict in decent for candidate in last.candidates):
        console.error("no candidate of the sweep passed", exit_code=GATE_EXIT)
        codes.append(GATE_EXIT)
    return summary.note(config.work, sweep, exit_code=max(codes, key=SEVERITY.index)).exit_code
