"""All checks that need a GPU. A step has parts; each runs in a separate process with a time limit and is PASS, FAIL or MISSING.

    python -m benchmarks.on_gpu --step correctness            # or verdicts, speed, peers, causes; `make gpu` runs all five
    python -m benchmarks.on_gpu --step speed --out FOLDER     # results and outputs of the parts (default: work/gpu)

This module imports only the standard library; the parts import their own libraries. A step takes at most ten minutes. It
rewrites FOLDER/STEP.json after every part, so an interrupted step keeps its results. MISSING names the package, program or
environment variable that a part needs, such as KVGATE_VLLM_PYTHON (a Python with vLLM).

Exit code 0 if no part failed, 3 if a part failed, 4 without a GPU.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import CDLL, byref, c_int
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Literal

from benchmarks.recording import ROOT, results_record

Status = Literal["PASS", "FAIL", "MISSING"]
LIBRARIES = (*("torch", "triton", "numpy", "transformers", "onnxruntime"), *("tensorrt", "tensorrt-llm", "flashinfer-python"))
STEP_SECONDS = 600
"""Time limit of a step: a borrowed machine ends a command after ten minutes."""
LAST_LINES = 30
"""Number of last lines of a part's output to keep in the results."""
ENVIRONMENT = {"REQUIRE_GPU": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
"""Environment of all parts. cuBLAS adds in a fixed order only if its workspace has a fixed size."""

PYTHON = shlex.quote(sys.executable)
PYTEST = f"{PYTHON} -m pytest -q -p no:cacheprovider"
CORES = str(min(12, os.cpu_count() or 1))
KERNELS = " ".join(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/integration/*/test_kernel_*.py")))
KV = "fp8k_int4v,fp8,bf16,sdpa bf16"
"""Kernels of every run of the attention benchmark."""
TESTED = "pytest hypothesis pydantic hydra triton"
"""Packages that all parts with tests need."""


@dataclass(frozen=True)
class Part:
    """A command of a step."""

    name: str
    command: str
    """The command, with quotes as in a shell; `{out}` stands for the folder of the results."""
    seconds: int
    """Time limit."""
    needs: str = ""
    """Required Python modules, programs on the path (`bin:ncu`) and environment variables (`env:NAME`), separated by spaces."""


@dataclass(frozen=True)
class PartResult:
    """The result of a part."""

    name: str
    status: Status
    seconds: float
    detail: str
    """The missing requirements or the reason of the failure; "" if the part passed."""
    command: str
    output: tuple[str, ...] = ()
    """Last lines of the output."""


def slug(name: str) -> str:
    """Return a name in a form for file names.

    >>> slug("8B, batch 32")
    '8b_batch_32'
    """
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


def test_part(name: str, seconds: int, needs: str, arguments: str) -> Part:
    """Return a part that runs tests."""
    return Part(name, f"{PYTEST} {arguments}", seconds, f"{TESTED} {needs}")


def attention_part(name: str, seconds: int, kernels: str, batches: str, tokens: str, group: int = 8, needs: str = "") -> Part:
    """Return a part that runs the attention benchmark."""
    sizes = f"--batches {batches} --tokens {tokens} --groups {group} --ragged '' --kernels '{kernels}'"
    command = f"{PYTHON} -m benchmarks.decode_attention --json {{out}}/{slug(name)}.json {sizes}"
    return Part(name, command, seconds, f"triton rich {needs}")


def evaluation_part(name: str, seconds: int, needs: str, arguments: str) -> Part:
    """Return a part that runs an evaluation, which must end in PASS."""
    command = f"{PYTHON} -m pipeline stage=evaluate tracking=none workdir={{out}}/{slug(name)} {arguments}"
    return Part(name, command, seconds, f"hydra pydantic modelopt transformers triton {needs}")


def profiled_part(name: str, seconds: int, tool: str) -> Part:
    """Return a part that runs a test of every kernel under a CUDA tool. `tool`: the tool's program and options."""
    kernels = f"{KERNELS} -k 'enter_the_ring or sharp_and_flat or equal_numbers'"
    return Part(name, f"{tool} {PYTEST} {kernels}", seconds, f"bin:{tool.partition(' ')[0]} {TESTED}")


KERNEL_ENGINE = "backend=torch backend.device=cuda"
VLLM = "backend=vllm backend.max_model_len=1024 backend.gpu_memory_utilization=0.3"
SECTIONS = "--section=Occupancy --section=MemoryWorkloadAnalysis_Tables --section=WarpStateStats"
FLASHINFER = "flashinfer fp8,flashinfer xqa fp8,flashinfer bf16,flashinfer xqa bf16"
PARALLEL = f"-n {CORES}"
STEPS: dict[str, tuple[Part, ...]] = {
    "correctness": (
        test_part("occupancy and benchmark", 120, "", "tests/gpu/test_kernels_on_gpu.py"),
        test_part("kernels against the reference", 240, "xdist", f"{PARALLEL} {KERNELS}"),
        test_part("engine", 180, "transformers", "tests/gpu/test_engine_on_gpu.py -k 'not command_line'"),
        test_part(
            "engine against the reference engine", 180, "transformers xdist", f"{PARALLEL} tests/long/test_reference_kernels.py"
        ),
        test_part(
            "reference engine",
            180,
            "transformers xdist",
            f"{PARALLEL} tests/gpu/test_reference_on_gpu.py -k 'not command_line'",
        ),
        test_part("command line", 240, "transformers modelopt", "tests/gpu/test_engine_on_gpu.py -k command_line"),
        test_part("TensorRT plans", 240, "transformers tensorrt onnxruntime", "tests/gpu/test_plans_on_gpu.py"),
    ),
    "verdicts": (
        *(evaluation_part(f"tiny {kv}", 150, "", f"kv={kv} {KERNEL_ENGINE}") for kv in ("fp8k_int4v", "fp8", "int8")),
        *(
            evaluation_part(f"tiny {kv} on vLLM", 300, "env:KVGATE_VLLM_PYTHON", f"kv={kv} {VLLM}")
            for kv in ("fp8", "vllm_int8")
        ),
    ),
    "speed": (
        attention_part("8B, batch 32, 2k", 150, KV, "32", "2k", group=4),
        attention_part("large caches", 200, KV, "8,32", "8k,32k"),
        *(
            Part(name.replace("_", " "), f"{PYTHON} -m benchmarks.{name} --json {{out}}/{name}.json", 240, "triton")
            for name in ("attention_variants", "context_attention")
        ),
    ),
    "peers": (attention_part("FlashInfer", 420, f"{KV},{FLASHINFER}", "8,32", "8k", needs="flashinfer"),),
    "causes": (
        profiled_part("races", 150, "compute-sanitizer --tool racecheck --error-exitcode 1"),
        profiled_part("memory", 150, "compute-sanitizer --tool memcheck --error-exitcode 1"),
        # Do not change the clocks of a shared card.
        profiled_part("counters", 200, f"ncu --clock-control none {SECTIONS} -c 20"),
    ),
}
"""Parts by step. The steps answer: are results correct, do caches pass, how fast are they, how fast are peers, and why."""


def gpus() -> int:
    """Return the number of GPUs that the CUDA driver finds; 0 without a driver."""
    try:
        cuda, count = CDLL("libcuda.so.1"), c_int(0)
    except OSError:
        return 0
    return count.value if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(byref(count)) == 0 else 0


def missing_requirements(part: Part) -> list[str]:
    """Return the requirements of a part that this machine does not meet."""
    finders: dict[str, Callable[[str], object]] = {"bin": which, "env": os.environ.get, "": find_spec}
    split = {need: need.rpartition(":") for need in part.needs.split()}
    return [need for need, (kind, _, name) in split.items() if not finders[kind](name)]


def run_part(part: Part, out: Path, seconds: float) -> PartResult:
    """Run a part, and kill all its processes at its end."""
    command = [word.replace("{out}", str(out)) for word in shlex.split(part.command)]
    shown_command = shlex.join(command).replace(PYTHON, "python")
    missing = missing_requirements(part)
    if missing:
        return PartResult(part.name, "MISSING", 0.0, ", ".join(need.rpartition(":")[2] for need in missing), shown_command)
    limit, started = min(part.seconds, seconds), time.monotonic()
    log = out / f"{slug(part.name)}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(max(limit, 0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    lines = log.read_text(errors="replace").splitlines()
    detail = "" if code == 0 else f"longer than {limit:.0f} s" if code is None else f"exit code {code}"
    took = time.monotonic() - started
    return PartResult(
        part.name, "FAIL" if detail else "PASS", round(took, 1), detail, shown_command, tuple(lines[-LAST_LINES:])
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its child processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def run_step(name: str, out: Path, say: Callable[[str], None] = print) -> list[PartResult]:
    """Run the parts of a step in order, and write the results after every part."""
    out.mkdir(parents=True, exist_ok=True)
    outcomes, started = list[PartResult](), time.monotonic()
    for part in STEPS[name]:
        outcomes.append(run_part(part, out, STEP_SECONDS - (time.monotonic() - started)))
        say(line(name, outcomes[-1]))
        results = [asdict(outcome) for outcome in outcomes]
        (out / f"{name}.json").write_text(json.dumps(results_record(results, LIBRARIES, step=name), indent=1) + "\n")
    return outcomes


def line(step: str, outcome: PartResult) -> str:
    """Return a part's line in the table."""
    return f"{outcome.status:8} {step:12} {outcome.name:36} {outcome.seconds:6.1f} s  {outcome.detail}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps of the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.on_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step", choices=[*STEPS, "all"], default="all")
    parser.add_argument("--out", type=Path, default=ROOT / "work" / "gpu", help="folder of the results")
    arguments = parser.parse_args(argv)
    if not gpus():
        print("an NVIDIA GPU is missing here: the CUDA driver (libcuda.so.1) finds none", file=sys.stderr)
        return 4
    names = list(STEPS) if arguments.step == "all" else [arguments.step]
    out = arguments.out.absolute()
    results = {name: run_step(name, out) for name in names}
    print("\n".join(["", *(line(name, outcome) for name, outcomes in results.items() for outcome in outcomes)]))
    return 3 if any(outcome.status == "FAIL" for outcomes in results.values() for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
