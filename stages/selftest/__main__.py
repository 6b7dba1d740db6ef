"""`python -m stages.selftest`: on a machine with a GPU and TensorRT, a verdict a line on what CI cannot see.

    PASS        launch                        decoded 3 sequences of 5, 64 and 129 tokens
    FAIL        append in place               ...
    CANNOT RUN  FP8 bindings                  ...

The exit code is 0 when every check passed, 3 when any failed, and 4 when none failed but some could not run. Each check
runs in a process of its own (`--check NAME`); the last line that it prints is the reason of its verdict.
"""

import argparse
import subprocess
import sys
import traceback
from pathlib import Path

from pipeline.artifacts.hardware import gpus
from pipeline.core.errors import EXIT_CODES, GateRefusal, MissingRequirement, UserError
from pipeline.core.redaction import child_environment
from stages.selftest import checks

FAILED, MISSING = EXIT_CODES[GateRefusal], EXIT_CODES[MissingRequirement]
VERDICTS = {0: "PASS", FAILED: "FAIL", MISSING: "CANNOT RUN"}
SECONDS = 1200
"""Time limit of one check. The first check builds the engines."""

POLICY = ("fp8k_int4v", "kv.sink_tokens=4", "kv.recent_tokens=64")
"""With exact tokens: the append overwrites them, after an attention that reads them, and TensorRT must keep that order."""


def main(arguments: list[str] | None = None) -> int:
    """Run every check, or the one that `--check` names, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stages.selftest", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", choices=[*checks.CHECKS], help="this one only, in this process")
    parser.add_argument("--model", default="pkg://stages.tiny/checkpoint", help="model.path of the engines")
    parser.add_argument("--kv", nargs="+", default=POLICY, metavar="POLICY", help="KV policy of the engines, and its overrides")
    parser.add_argument("--workdir", default="work", help="where engines are kept")
    options = parser.parse_args(arguments)
    if options.check is not None:
        return run_check(options)
    flags = ["--model", options.model, "--kv", *options.kv, "--workdir", options.workdir]
    missing = None if gpus() else "no NVIDIA GPU with a driver here (nvidia-smi): run this on a machine with one"
    codes = []
    for name in checks.CHECKS:
        command = [sys.executable, "-m", "stages.selftest", "--check", name, *flags]
        code, reason = (MISSING, missing) if missing else run_process(command)
        codes.append(code)
        print(f"{VERDICTS[code]:<11} {name:<29} {reason}", flush=True)
    return FAILED if FAILED in codes else max(codes)


def run_check(options: argparse.Namespace) -> int:
    """Run one check in this process, print its reason, and return the exit code of its verdict."""
    try:
        try:
            bench = checks.Bench(options.model, options.kv, Path(options.workdir))
        except UserError as error:
            # A wrong --model or --kv. What TensorRT refuses later is a failure.
            raise MissingRequirement(str(error)) from error
        code, reason = 0, checks.CHECKS[options.check](bench)
    except checks.CheckFailure as error:
        code, reason = FAILED, str(error)
    except MissingRequirement as error:
        code, reason = MISSING, str(error)
    except Exception as error:
        # The self-test exists to find what TensorRT or CUDA throw: it is printed in full and judged a failure.
        traceback.print_exc()
        code, reason = FAILED, f"{type(error).__name__}: {error}"
    print(" ".join(reason.split()))
    return code


def run_process(command: list[str], seconds: float = SECONDS) -> tuple[int, str]:
    """Run one check in a process of its own; a crash or a hang is a failure of that check.

    Args:
        command: The command line of the check.
        seconds: Time limit.

    Returns:
        The exit code of its verdict, and its reason.
    """
    try:
        environment = child_environment()
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return FAILED, f"no verdict after {seconds:.0f} s"
    lines, code = result.stdout.strip().splitlines(), result.returncode
    if code in VERDICTS and lines:
        return code, lines[-1]
    return FAILED, f"the process was killed by signal {-code}" if code < 0 else f"the process ended with exit code {code}"


if __name__ == "__main__":
    sys.exit(main())
