"""`python -m pipeline stage=... model.path=... kv=...`: the command line."""

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from pipeline import __version__
from pipeline.config.compose import CONF, plan, to_config
from pipeline.core.errors import INTERRUPTED, REFUSALS, SEVERITY, UserError, exit_code
from pipeline.run.inputs import check_inputs

SWEEP_VARIABLE = "KVGATE_SWEEP"
"""The id that joins the candidates of one command reaches every job, whatever launches it, through the environment."""
SWEPT_VARIABLE = "KVGATE_SWEPT"
"""Keys that differ between its jobs, likewise."""


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def _job(composed: DictConfig) -> None:
    # not at the top: a configuration error must show before the runner's libraries are loaded
    from pipeline.run.runner import run

    hydra_config = HydraConfig.get()
    sweeping = hydra_config.mode == RunMode.MULTIRUN
    try:
        # what tells this candidate from the others of its sweep, and from the policy as it is in conf/kv
        telling = ("kv.", *(f"{key}=" for key in os.environ[SWEPT_VARIABLE].split() if key != "kv"))
        changed = [o.replace("'", "") for o in hydra_config.overrides.task if o.startswith(telling)]
        run(to_config(composed), os.environ[SWEEP_VARIABLE], sweeping, changed)
    except REFUSALS as error:
        # raised through Hydra it would come with a line of Hydra's own; a sweep goes on, and its summary remembers
        _say(error)
        _codes.append(exit_code(error))


_codes: list[int] = []
"""Exit codes of the jobs of this process that were refused."""


def _say(error: Exception) -> None:
    for line in str(error).splitlines():
        print(f"pipeline: error: {line}", file=sys.stderr)


def _refuse_argument(message: str) -> NoReturn:
    raise UserError(message)


def _dispatch(argv: list[str]) -> int:
    parser = get_args_parser()
    parser.error = _refuse_argument  # type: ignore[method-assign]
    # -m may stand anywhere; hydra.main, which reads sys.argv, wants it before or after all overrides
    arguments = parser.parse_intermixed_args(argv)
    sys.argv = ["pipeline", *sorted(argv, key=lambda argument: argument not in ("-m", "--multirun"))]
    if arguments.help or arguments.hydra_help or arguments.info or arguments.shell_completion:
        _job()
        return 0
    if arguments.config_dir and not Path(arguments.config_dir).is_dir():
        raise UserError(f"--config-dir={arguments.config_dir}: no such directory")
    extra = [f"hydra.searchpath=[file://{Path(arguments.config_dir).resolve()}]"] if arguments.config_dir else []
    asked = plan([*arguments.overrides, *extra], arguments.multirun)
    if arguments.cfg:
        _job()
        return 0
    for job in asked.jobs:
        check_inputs(job)
    os.environ[SWEEP_VARIABLE] = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    os.environ[SWEPT_VARIABLE] = " ".join(asked.swept)
    if not asked.sweeping:
        _job()
        return _codes[0] if _codes else 0
    from pipeline.run.runner import conclude_sweep

    try:
        _job()
    finally:
        code = conclude_sweep(asked.jobs[0], os.environ[SWEEP_VARIABLE])
    return max([code, *_codes], key=SEVERITY.index)


def main() -> int:
    """Run the command line; returns the exit code."""
    argv = sys.argv[1:]
    if argv == ["--version"]:
        print(f"kvgate {__version__}")
        return 0
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra would print its own report and exit with 1
    try:
        return _dispatch(argv)
    except REFUSALS as error:
        _say(error)
        return exit_code(error)
    except KeyboardInterrupt:
        print("pipeline: interrupted; what was finished is kept, run it again to go on", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
