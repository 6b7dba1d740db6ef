"""`python -m pipeline stage=... model.path=... kv=...`: the command line."""

import gc
import os
import re
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from pipeline import __version__
from pipeline.cli import console
from pipeline.cli.progress import show_progress
from stages.core.errors import INTERRUPTED, UserError, exit_code, short
from stages.core.redaction import redact_text
from stages.core.streams import open_closed_streams, redact_output, reserve_stdout

if TYPE_CHECKING:
    from pipeline.config.compose import Plan


def _refuse_argument(message: str) -> NoReturn:
    raise UserError(f"{message}; give KEY=VALUE, or an option that --help lists")


def _parser() -> ArgumentParser:
    """Return the parser of the options that kvgate shares with Hydra."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = _refuse_argument  # type: ignore[method-assign]
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    return parser


def _asked_mode(argv: Sequence[str]) -> str:
    """Return the value of `log=` in the arguments, so that errors before the composition are printed in this mode."""
    modes = [argument.removeprefix("log=") for argument in argv if argument.startswith("log=")]
    return modes[-1] if modes and modes[-1] in console.MODES else "human"


def _run_hydra(parser: ArgumentParser, arguments: Namespace) -> int:
    """Let Hydra print its help, with the options of all groups, or a shell's completions."""
    from hydra.core.global_hydra import GlobalHydra

    from pipeline.config.compose import initialized

    with initialized():
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        if arguments.help:
            hydra.app_help("config", parser, Namespace(overrides=[], resolve=False))
        else:
            hydra.shell_completion("config", arguments.overrides)
    return 0


def _plan_command(argv: Sequence[str]) -> "Plan | int":
    """Return the checked jobs of a command line, or an exit code if the command starts no job (--help, --cfg, dry=true)."""
    parser = _parser()
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if arguments.shell_completion and not re.fullmatch("(un)?install=(bash|zsh|fish)|query=.*", " ".join(arguments.overrides)):
        raise UserError("--shell-completion: give install=bash, zsh or fish, or uninstall= of one")
    if arguments.help or arguments.shell_completion:
        return _run_hydra(parser, arguments)
    from pipeline.config.compose import configurations, plan
    from pipeline.config.overrides import refuse_contradictions

    if unknown:
        _refuse_argument(redact_text(f"{short(unknown[0])}: no such option"))
    refuse_contradictions(arguments.overrides)
    planned = plan(arguments.overrides, arguments.multirun, arguments.config_dir)
    if arguments.cfg:
        print(*configurations(planned), sep="", end="")
        return 0
    console.configure(planned.jobs[0].log)
    if any(job.dry for job in planned.jobs):
        from pipeline.chain.dry import preview

        return preview(planned)
    from pipeline.chain.inputs import check_inputs

    with show_progress("checking the inputs"):
        check_inputs(*planned.jobs)
    return planned


def main() -> int:
    # SIGTERM, which ends containers and CI jobs, acts like Ctrl-C: the end is recorded. The first process of a container would
    # ignore SIGTERM without a handler.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # torch's threads would spin while they wait. On a busy machine, spinning slowed a verdict by a factor of 2.6.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    gc.set_threshold(10_000)  # else collecting cycles during MLflow's import takes a tenth of a command's time
    open_closed_streams()
    reserve_stdout()
    redact_output()
    argv = sys.argv[1:]
    if "--version" in argv:
        print(f"kvgate {__version__}", flush=True)
        return 0
    console.configure(_asked_mode(argv))
    try:
        planned = _plan_command(argv)
        if isinstance(planned, int):
            return planned
        from pipeline.chain.command import run
        from pipeline.registry.summary import new_sweep

        return run(planned, new_sweep())
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
