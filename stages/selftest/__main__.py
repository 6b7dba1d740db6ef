"""`python -m stages.selftest.__main__`: on the first machine with a GPU and TensorRT, a verdict a line on what CI cannot see.

    PASS        launch                        decoded 3 sequences of 5, 64 and 129 tokens
    FAIL        aliased append                ...
    CANNOT RUN  shared memory above 48 KB     ...

Exit code 0 when every check passed, 3 when any failed, 4 when none failed but some could not run. Each check runs in a process
of its own, `--check NAME`; what it prints last is its reason.
"""

import argparse
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from pipeline.artifacts.hardware import gpus
from pipeline.core.errors import EXIT_CODES, GateRefusal, MissingRequirement, UserError
from stages.engines.tensorrt.library import load
from stages.selftest.checks import CHECKS, Bench, judge

FAILED, MISSING = EXIT_CODES[GateRefusal], EXIT_CODES[MissingRequirement]
CODES = {"PASS": 0, "FAIL": FAILED, "CANNOT RUN": MISSING}
SECONDS = 1200
"""Of one check; the first one builds the engines."""

Runner = Callable[[str], tuple[str, str]]


def main(arguments: list[str] | None = None) -> int:
    """Run every check, or the one that is named. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stages.selftest.__main__", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", choices=[*CHECKS], help="this one only, in this process")
    parser.add_argument("--model", default="pkg://stages.tiny/checkpoint", help="model.path of the engines")
    parser.add_argument("--kv", default="fp8k_int4v", help="KV policy of the engines")
    parser.add_argument("--workdir", default="work", help="where engines are kept")
    given = parser.parse_args(arguments)
    if given.check is not None:
        return run_here(given.check, given.model, given.kv, given.workdir)
    options = ["--model", given.model, "--kv", given.kv, "--workdir", given.workdir]
    return run_all(lambda name: run_apart([sys.executable, "-m", "stages.selftest.__main__", "--check", name, *options]))


def run_all(run: Runner) -> int:
    """Print a verdict for every check that `run` runs; the worst becomes the exit code."""
    if not gpus():
        reason = "no NVIDIA GPU with a driver here (nvidia-smi): run this on a machine with one"
        for name in CHECKS:
            _say("CANNOT RUN", name, reason)
        return MISSING
    verdicts = []
    for name in CHECKS:
        verdict, reason = run(name)
        verdicts.append(verdict)
        _say(verdict, name, reason)
    return FAILED if "FAIL" in verdicts else MISSING if "CANNOT RUN" in verdicts else 0


def run_here(name: str, model: str, policy: str, workdir: str) -> int:
    """One check in this process."""

    def bench() -> Bench:
        load("tensorrt")  # before torch is imported for nothing
        from stages.selftest.bench import GpuBench

        try:
            return GpuBench(model, policy, Path(workdir))
        except UserError as error:
            raise MissingRequirement(str(error)) from error  # --model or --kv; what TensorRT refuses later is a failure

    try:
        verdict, reason = judge(name, bench)
    except Exception as error:
        # Whatever TensorRT or CUDA throw is what this script is for: shown in full, judged a failure, and the process ends.
        traceback.print_exc()
        verdict, reason = "FAIL", f"{type(error).__name__}: {error}"
    print(" ".join(reason.split()))
    return CODES[verdict]


def run_apart(command: list[str], seconds: float = SECONDS) -> tuple[str, str]:
    """One check in a process of its own: a crash or a hang is a failure of that check."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return "FAIL", f"no verdict after {seconds:.0f} s"
    said = done.stdout.strip().splitlines()
    code = done.returncode
    for verdict, own in CODES.items():
        if code == own and said:
            return verdict, said[-1]
    return "FAIL", f"the process was killed by signal {-code}" if code < 0 else f"the process ended with exit code {code}"


def _say(verdict: str, name: str, reason: str) -> None:
    print(f"{verdict:<11} {name:<29} {reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
