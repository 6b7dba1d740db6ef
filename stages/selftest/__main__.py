"""`python -m stages.selftest`: on a machine with a GPU and TensorRT, a verdict a line on what CI cannot see.

    PASS        launch                        decoded 3 sequences of 5, 64 and 129 tokens
    FAIL        append in place               ...
    CANNOT RUN  shared memory above 48 KB     ...

The exit code is 0 when every check passed, 3 when any failed, and 4 when none failed but some could not run. Each check
runs in a process of its own (`--check NAME`); the last line that it prints is the reason of its verdict.
"""

import argparse
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.artifacts.hardware import gpus
from pipeline.core.errors import EXIT_CODES, GateRefusal, MissingRequirement, UserError
from pipeline.core.redaction import child_environment
from stages.engines.tensorrt.library import load
from stages.selftest.checks import CHECKS, Bench, judge

FAILED, MISSING = EXIT_CODES[GateRefusal], EXIT_CODES[MissingRequirement]
CODES = {"PASS": 0, "FAIL": FAILED, "CANNOT RUN": MISSING}
SECONDS = 1200
"""Time limit of one check. The first check builds the engines."""

POLICY = ("fp8k_int4v", "kv.sink_tokens=4", "kv.recent_tokens=64")
"""With exact tokens: the append overwrites them, after an attention that reads them, and TensorRT must keep that order."""

Runner = Callable[[str], tuple[str, str]]
"""Runs the check of a name and returns its verdict and reason."""


def main(arguments: list[str] | None = None) -> int:
    """Run every check, or the one that `--check` names, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stages.selftest", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", choices=[*CHECKS], help="this one only, in this process")
    parser.add_argument("--model", default="pkg://stages.tiny/checkpoint", help="model.path of the engines")
    parser.add_argument("--kv", nargs="+", default=POLICY, metavar="POLICY", help="KV policy of the engines, and its overrides")
    parser.add_argument("--workdir", default="work", help="where engines are kept")
    options = parser.parse_args(arguments)
    if options.check is not None:
        return run_check(options.check, options.model, options.kv, options.workdir)
    flags = ["--model", options.model, "--kv", *options.kv, "--workdir", options.workdir]
    return run_all(lambda name: run_process([sys.executable, "-m", "stages.selftest", "--check", name, *flags]))


def run_all(run: Runner) -> int:
    """Run every check with `run`, print the verdicts, and return the exit code of the worst."""
    if not gpus():
        reason = "no NVIDIA GPU with a driver here (nvidia-smi): run this on a machine with one"
        for name in CHECKS:
            _print_verdict("CANNOT RUN", name, reason)
        return MISSING
    verdicts = []
    for name in CHECKS:
        verdict, reason = run(name)
        verdicts.append(verdict)
        _print_verdict(verdict, name, reason)
    return FAILED if "FAIL" in verdicts else MISSING if "CANNOT RUN" in verdicts else 0


def run_check(name: str, model: str, policy: Sequence[str], workdir: str) -> int:
    """Run one check in this process, print its reason, and return the exit code of its verdict."""

    def bench() -> Bench:
        load("tensorrt")  # first: without TensorRT there is no need to import torch
        from stages.selftest.bench import GpuBench

        try:
            return GpuBench(model, policy, Path(workdir))
        except UserError as error:
            # A wrong --model or --kv. What TensorRT refuses later is a failure.
            raise MissingRequirement(str(error)) from error

    try:
        verdict, reason = judge(name, bench)
    except Exception as error:
        # The self-test exists to find what TensorRT or CUDA throw: it is printed in full and judged a failure.
        traceback.print_exc()
        verdict, reason = "FAIL", f"{type(error).__name__}: {error}"
    print(" ".join(reason.split()))
    return CODES[verdict]


def run_process(command: list[str], seconds: float = SECONDS) -> tuple[str, str]:
    """Run one check in a process of its own; a crash or a hang is a failure of that check.

    Args:
        command: The command line of the check.
        seconds: Time limit.

    Returns:
        The verdict and its reason.
    """
    try:
        environment = child_environment()
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return "FAIL", f"no verdict after {seconds:.0f} s"
    lines = result.stdout.strip().splitlines()
    code = result.returncode
    for verdict, verdict_code in CODES.items():
        if code == verdict_code and lines:
            return verdict, lines[-1]
    return "FAIL", f"the process was killed by signal {-code}" if code < 0 else f"the process ended with exit code {code}"


def _print_verdict(verdict: str, name: str, reason: str) -> None:
    print(f"{verdict:<11} {name:<29} {reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
