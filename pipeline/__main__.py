"""`python -m pipeline stage=... model.path=... kv=...`: the command line."""

import gc
import os
import re
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipeline import __version__
from pipeline.cli import console
from pipeline.config import CONF
from stages.core.errors import INTERRUPTED, UserError, exit_code
from stages.core.redaction import open_closed, redact_output

if TYPE_CHECKING:
    from pipeline.config.compose import Plan


OPTIONS = ("overrides", "help", "cfg", "multirun", "config_dir", "shell_completion")
"""Arguments of Hydra's parser that kvgate takes."""


def _refuse_argument(message: str) -> NoReturn:
    raise UserError(f"{message}; give KEY=VALUE, or an option that --help lists")


class _GivenOnce(Namespace):
    """Values of options that may be given only once: argparse would silently take the last value."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(vars(self).get(name), str):
            raise UserError(f"--{name.replace('_', '-')}={value}: is given twice; give it once")
        super().__setattr__(name, value)


def _check_options(arguments: Namespace) -> None:
    """Refuse Hydra options that would compose another configuration than kvgate's, or that concern Hydra itself."""
    if arguments.cfg not in (None, "job"):
        raise UserError(f"--cfg={arguments.cfg}: shows Hydra's configuration; give --cfg job")
    for name, value in vars(arguments).items():
        if name not in OPTIONS and value not in (None, False):
            option = f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            raise UserError(f"{option}: is an option of Hydra's; give one that --help lists")
    if arguments.config_dir is not None and not Path(arguments.config_dir).is_dir():
        raise UserError(f"--config-dir={arguments.config_dir}: no such directory; give the one with your own kv/")


def _asked_mode(argv: Sequence[str]) -> str:
    """Return the value of `log=` in the arguments, so that errors before the composition are printed in this mode."""
    modes = [argument.removeprefix("log=") for argument in argv if argument.startswith("log=")]
    return modes[-1] if modes and modes[-1] in console.MODES else "human"


def _by_hydra(parser: ArgumentParser, arguments: Namespace) -> int:
    """Let Hydra print its help, with the options of all groups, or a shell's completions."""
    from hydra import version
    from hydra._internal.utils import _run_hydra

    from pipeline.config import compose  # noqa: F401 - the import registers options that are not files

    if arguments.help:
        arguments.overrides = []  # else a typo would hide the help
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints a report of its own and exits with 1
    version.setbase("1.3")
    _run_hydra(arguments, parser, lambda _: None, str(CONF), "config")
    return 0


def _planned(argv: Sequence[str]) -> "Plan | int":
    """Return the checked jobs of a command line, or the exit code of an option or a dry run, which starts no job."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse_argument  # type: ignore[method-assign]
    arguments = parser.parse_intermixed_args(argv, _GivenOnce())
    if arguments.shell_completion and not re.fullmatch("(un)?install=(bash|zsh|fish)|query=.*", " ".join(arguments.overrides)):
        raise UserError("--shell-completion: give install=bash, zsh or fish, or uninstall= of one")
    _check_options(arguments)
    if arguments.help or arguments.shell_completion:
        return _by_hydra(parser, arguments)
    from pipeline.config.compose import configurations, plan
    from pipeline.config.overrides import SEARCHPATH, names_searchpath, searching

    if arguments.config_dir and any(map(names_searchpath, arguments.overrides)):
        raise UserError(f"--config-dir={arguments.config_dir}: {SEARCHPATH} is given as well; name all folders there")
    extra = [searching(arguments.config_dir)] if arguments.config_dir else []
    planned = plan([*arguments.overrides, *extra], arguments.multirun)
    if arguments.cfg:
        print(*configurations(planned), sep="", end="")
        return 0
    console.configure(planned.jobs[0].log)
    if any(job.dry for job in planned.jobs):
        from pipeline.chain.dry import foretell

        return foretell(planned)
    from pipeline.chain.inputs import check_inputs

    with console.progress("checking the inputs"):
        check_inputs(*planned.jobs)
    from pipeline.cli import next_steps

    folder = ["--config-dir", str(arguments.config_dir)] if arguments.config_dir else []
    next_steps.remember([*folder, *arguments.overrides])
    return planned


def main() -> int:
    """Run the command line and return the exit code."""
    # SIGTERM, which ends containers and CI jobs, acts like Ctrl-C: runs are closed. The first process of a container would
    # ignore SIGTERM without a handler.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # torch's threads would spin while they wait. On a busy machine, spinning slowed a verdict by a factor of 2.6.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    gc.set_threshold(10_000)  # else collecting cycles during MLflow's import takes a tenth of a command's time
    open_closed()
    redact_output()
    argv = sys.argv[1:]
    if "--version" in argv:
        print(f"kvgate {__version__}", flush=True)
        return 0
    console.speak(_asked_mode(argv))
    try:
        planned = _planned(argv)
        if isinstance(planned, int):
            return planned
        from pipeline.chain.runner import run
        from pipeline.chain.sweeps import sweep
        from pipeline.registry.summary import new_sweep

        if planned.sweeping:
            return sweep(planned, new_sweep())
        (config,), (name,) = planned.jobs, planned.names
        run(config, new_sweep(), console.RunningJob(config.stage, name))
        return 0
    except Exception as error:
        console.ended_by(error)
        return exit_code(error)
    except KeyboardInterrupt:
        console.end()
        console.error("interrupted; finished work is kept; run it again to continue", exit_code=INTERRUPTED)
        return INTERRUPTED
    finally:
        console.close()
        sys.stdout.flush()  # else Python would report a closed pipe or a full disk at exit
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
