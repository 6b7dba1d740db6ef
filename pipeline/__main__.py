"""`python -m pipeline stage=... model=... kv=...`: the command line. Exit codes: 0 done, 1 a defect, else EXIT_CODES."""

import os
import sys
import time
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from pipeline import __version__
from pipeline.chain import check_inputs
from pipeline.compose import plan, to_config
from pipeline.errors import GateRefusal, MissingRequirement, UserError

EXIT_CODES: dict[type[Exception], int] = {UserError: 2, GateRefusal: 3, MissingRequirement: 4}

SWEEP_VARIABLE = "KVGATE_SWEEP"
"""The id that joins the candidates of one command reaches every job, whatever launches it, through the environment."""


@hydra.main(config_path="pkg://conf", config_name="config", version_base="1.3")
def _job(composed: DictConfig) -> None:
    # not at the top: a configuration error must show before the runner's libraries are loaded
    from pipeline.runner import run

    sweeping = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        run(to_config(composed), os.environ[SWEEP_VARIABLE], sweeping)
    except tuple(EXIT_CODES) as error:
        if sweeping:
            raise
        _refused.append(error)  # raised through Hydra it would come with a line of Hydra's own


_refused: list[Exception] = []
"""Why the only job of a run without a sweep stopped."""


def _refuse_argument(message: str) -> NoReturn:
    raise UserError(message)


def _dispatch(argv: list[str]) -> None:
    parser = get_args_parser()
    parser.error = _refuse_argument  # type: ignore[method-assign]
    # -m may stand anywhere; hydra.main, which reads sys.argv, wants it before or after all overrides
    arguments = parser.parse_intermixed_args(argv)
    sys.argv = ["pipeline", *sorted(argv, key=lambda argument: argument not in ("-m", "--multirun"))]
    if arguments.help or arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion:
        _job()
        return
    jobs, sweeping = plan(arguments.overrides, arguments.multirun)
    for job in jobs:
        check_inputs(job)
    os.environ[SWEEP_VARIABLE] = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    _job()
    if _refused:
        raise _refused[0]
    if sweeping:
        from pipeline.runner import conclude_sweep

        conclude_sweep(jobs[0], os.environ[SWEEP_VARIABLE])


def main() -> int:
    """Run the command line; returns the exit code."""
    argv = sys.argv[1:]
    if argv == ["--version"]:
        print(f"kvgate {__version__}")
        return 0
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra would print its own report and exit with 1
    try:
        _dispatch(argv)
    except tuple(EXIT_CODES) as error:
        for line in str(error).splitlines():
            print(f"pipeline: error: {line}", file=sys.stderr)
        return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
    return 0


if __name__ == "__main__":
    sys.exit(main())
