"""`python -m pipeline stage=... model.path=... kv=...`: the command line."""

import os
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, get_args

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from pipeline import __version__
from pipeline.config import CONF
from pipeline.config.completion import complete
from pipeline.config.compose import Plan, named, plan, to_config
from pipeline.config.config import Config
from pipeline.config.launchers import BASIC, LAUNCHERS
from pipeline.config.overrides import LAUNCHER
from pipeline.config.showing import configurations
from pipeline.config.workers import SLURM, end_workers, finish, lost_worker, start
from pipeline.core.errors import INTERRUPTED, REFUSALS, UserError, describe, exit_code
from pipeline.core.redaction import redact_output
from pipeline.registry.summary import new_sweep
from pipeline.terminal import console

SWEEP_VARIABLE = "KVGATE_SWEEP"
"""Environment variable of a job with the id that joins the candidates of one command."""
SWEPT_VARIABLE = "KVGATE_SWEPT"
"""Environment variable of a job with the keys that differ between those of a sweep."""
JOBS_VARIABLE = "KVGATE_JOBS"
"""Environment variable of a job with how many jobs the sweep has."""

JSON = "--json"
"""The one option that is kvgate's own."""

DEBUG_VARIABLE = "KVGATE_DEBUG"
"""Environment variable: 1 shows where an exception came from that is no refusal."""


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def _job(composed: DictConfig) -> None:
    redact_output()  # a launcher may run the job in a process of its own
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # and so it does here; what a cluster set stays
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    hydra_config = HydraConfig.get()
    sweeping = hydra_config.mode == RunMode.MULTIRUN
    number = hydra_config.job.num + 1 if sweeping else 1
    try:
        config = to_config(composed)
        console.configure(config.log)
        changed = named(hydra_config.overrides.task, os.environ[SWEPT_VARIABLE].split())
        of = int(os.environ[JOBS_VARIABLE]) if sweeping else 1
        beside_others = sweeping and hydra_config.runtime.choices[LAUNCHER] != BASIC
        job = console.Job(config.stage, " ".join([config.kv.name, *changed]), number, of)
        # Imported late: a configuration error must show before the runner's libraries are loaded.
        with console.doing(f"{job.name}starting"):
            from pipeline.run.runner import run
        run(
            config,
            os.environ[SWEEP_VARIABLE],
            sweeping,
            changed,
            number,
            of,
            beside_others=beside_others,
        )
    except Exception as error:
        # Hydra would add a line of its own to an exception. A sweep goes on; its summary remembers the exit code.
        _print_error(error)
        if not sweeping:
            _exit_codes.append(exit_code(error))
    finally:
        console.end()


_exit_codes: list[int] = []
"""The exit code of a single job, where it was refused. A sweep's are in its summary: its jobs may run in other processes."""


_own_options: set[str] = set()
"""Options of kvgate's own that were given: Hydra knows none of them."""


def _print_error(error: Exception) -> None:
    """Print what ends a job. Anything but a refusal also shows where it came from, where the environment asks for it."""
    for line in describe(error).splitlines():
        console.error(line, exit_code=exit_code(error))
    if os.environ.get(DEBUG_VARIABLE) == "1" and not isinstance(error, REFUSALS):
        console.trace("".join(traceback.format_exception(error)))


def _refuse_argument(message: str) -> NoReturn:
    raise UserError(f"{message}; give KEY=VALUE, or an option that --help lists")


def _check_options(arguments: Namespace) -> None:
    """Refuse Hydra's options that would compose something else than kvgate's configuration, or do nothing here."""
    for option, value in (
        ("--config-name", arguments.config_name),
        ("--config-path", arguments.config_path),
        ("--experimental-rerun", arguments.experimental_rerun),
    ):
        if value is not None:
            raise UserError(f"{option}={value}: kvgate has its own configuration; add files of yours with --config-dir=DIR")
    if arguments.run:
        raise UserError("--run: is what kvgate does without -m; leave it out")
    if arguments.cfg and arguments.cfg != "job" and (arguments.multirun or arguments.package):
        raise UserError(f"--cfg={arguments.cfg}: shows one job as a whole; give --cfg job, or leave -m and --package out")
    if not arguments.cfg:
        for option, given in (("--resolve", arguments.resolve), ("--package", arguments.package)):
            if given:
                raise UserError(f"{option}: is about what --cfg shows; add --cfg job, or leave it out")
    if arguments.config_dir is not None and not Path(arguments.config_dir).is_dir():
        raise UserError(f"--config-dir={arguments.config_dir}: no such directory; give the one with your own kv/")


def _check_json(planned: Plan) -> None:
    """Refuse `--json` where there is no one document to print."""
    if JSON not in _own_options:
        return
    if planned.sweeping or planned.jobs[0].stage != "status":
        raise UserError(f"{JSON}: only stage=status prints JSON, of one work directory; leave it out")
    if planned.jobs[0].log == "json":
        raise UserError(f"{JSON}: prints one document, log=json one object a line; leave one of them out")
    if planned.jobs[0].dry:
        raise UserError(
            f"{JSON}: prints one document, and dry=true says more than it; leave one of them out: stage=status writes nothing"
        )


def _without(argv: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The arguments that are no overrides, which argparse lists in the order of the command line."""
    remaining, options = list(overrides), []
    for argument in argv:
        if remaining and argument == remaining[0]:
            del remaining[0]
        else:
            options.append(argument)
    return options


def _shown(show: Callable[[], object]) -> int:
    """Print what was asked for."""
    show()
    return 0


def _asked_mode(argv: Sequence[str]) -> str:
    """Return `log=` as far as the command line shows it: what is refused before a composition is said that way too."""
    asked = [argument.removeprefix("log=") for argument in argv if argument.startswith("log=")]
    return asked[-1] if asked and asked[-1] in get_args(Config.model_fields["log"].annotation) else "human"


def _dispatch(argv: list[str]) -> int:
    if JSON in argv:
        _own_options.add(JSON)
        argv = [argument for argument in argv if argument != JSON]
    parser = get_args_parser()
    parser.error = _refuse_argument  # type: ignore[method-assign]
    # Options may stand anywhere on our command line. hydra.main reads sys.argv and wants them before or after all overrides.
    arguments = parser.parse_intermixed_args(argv)
    sys.argv = ["pipeline", *_without(argv, arguments.overrides), *arguments.overrides]
    if arguments.shell_completion:
        return complete(arguments.overrides)
    if arguments.help or arguments.hydra_help or arguments.info:
        return _shown(_job)
    _check_options(arguments)
    extra = [f"hydra.searchpath=[file://{Path(arguments.config_dir).resolve()}]"] if arguments.config_dir else []
    planned = plan([*arguments.overrides, *extra], arguments.multirun)
    if arguments.cfg:
        documents = configurations(planned, arguments.package, arguments.resolve)
        return _shown(_job if arguments.cfg != "job" else lambda: print(*documents, sep="", end=""))
    _check_json(planned)
    console.configure(planned.jobs[0].log)
    if any(job.dry for job in planned.jobs):
        from pipeline.dry.command import foretell

        return foretell(planned)
    with console.doing("checking the inputs"):
        from pipeline.run.inputs import check_inputs

        for job in planned.jobs:
            check_inputs(job)
    sweep = new_sweep()
    # Hydra sets them around each job, on whatever machine it runs.
    for variable, value in (
        (SWEEP_VARIABLE, sweep),
        (SWEPT_VARIABLE, " ".join(planned.swept)),
        (JOBS_VARIABLE, len(planned.jobs)),
    ):
        sys.argv.append(f"+hydra.job.env_set.{variable}='{value}'")
    if not planned.sweeping:
        return _single(planned.jobs[0])
    from pipeline.terminal.commands import repeated

    typed = repeated(arguments.overrides)
    if arguments.config_dir:
        typed = ["--config-dir", str(arguments.config_dir), *typed]
    return _sweep(planned, sweep, typed)


def _single(job: Config) -> int:
    """Run the one job of a command and return its exit code."""
    if job.stage == "status":  # it is asked often, and Hydra would compose its configuration three times more
        from pipeline.upkeep.status import show_status

        return _shown(lambda: show_status(job, as_json=JSON in _own_options))
    _job()
    return _exit_codes[0] if _exit_codes else 0


def _sweep(planned: Plan, sweep: str, typed: Sequence[str]) -> int:
    """Run the jobs of a sweep and return its exit code."""
    from pipeline.run.runner import holding

    with holding(planned.jobs[0]):  # between its jobs as well
        return _run_sweep(planned, sweep, typed)


def _run_sweep(planned: Plan, sweep: str, typed: Sequence[str]) -> int:
    """Run the jobs, and take the exit code of what they left: they may run in other processes."""
    from pipeline.run.runner import begin_sweep, conclude_sweep

    first, output = planned.jobs[0], LAUNCHERS[planned.launcher].output
    with console.doing(f"starting {planned.launcher}"):
        sys.argv += start(planned.launcher, planned.launcher_keys)
    begin_sweep(first, sweep, planned.names, typed)
    if output is not None:
        console.LOGGER.info("jobs write what they print below %s", first.work / output)
    code, elsewhere = 0, output is not None
    try:
        _job()
        finish(planned.launcher)
    except (KeyboardInterrupt, SystemExit) as error:  # Ray makes a SystemExit of SIGTERM
        end_workers(planned.launcher)
        if planned.launcher == SLURM:
            console.LOGGER.info("jobs that Slurm has go on; scancel ends them")
        conclude_sweep(first, sweep, typed, planned.swept, INTERRUPTED, elsewhere)
        raise KeyboardInterrupt from error
    except Exception as error:  # of the launcher: those of jobs do not come here
        end_workers(planned.launcher)
        error = lost_worker(planned.launcher, error) or error
        _print_error(error)
        code = exit_code(error)
    return conclude_sweep(first, sweep, typed, planned.swept, code, elsewhere)


def main() -> int:
    """Run the command line and return the exit code."""
    # What ends a container or a job of CI is a Ctrl-C: runs are closed, and samples in flight finish. The first process of a
    # container would ignore it without a handler.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    redact_output()
    argv = sys.argv[1:]
    if "--version" in argv:
        print(f"kvgate {__version__}")
        return 0
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints a report of its own and exits with 1
    console.speak(_asked_mode(argv))
    try:
        return _dispatch(argv)
    except Exception as error:
        _print_error(error)
        return exit_code(error)
    except KeyboardInterrupt:
        console.interrupted("what was finished is kept, run it again to go on")
        return INTERRUPTED
    finally:
        console.close()
        sys.stdout.flush()  # at its end Python would say that nobody reads


if __name__ == "__main__":
    sys.exit(main())
