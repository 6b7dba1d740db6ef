"""Helpers for the benchmarks of the attention kernels: random caches, kernels and candidates, timing on a GPU, result rows.

A results file also describes the GPU, its driver and CUDA (`gpu`). decode_attention.py selects the fastest candidate of every
kernel and checks its output in the same run.

Shapes: B sequences, N pages, P pages of the longest sequence, H KV heads in groups of G query heads, Hq = H * G, D head_dim.
"""

import argparse
import math
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import attention_cases
from benchmarks import attention_reference as reference
from benchmarks.attention_cases import DecodeCase, Row
from benchmarks.recording import log, results_record, write_json
from plugins.kv_attention.layout import PAGE_TOKENS


def gpu(device: torch.device) -> dict[str, Any]:
    """Return the description of the GPU, its driver ("" without nvidia-smi) and CUDA."""
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", f"--id={device.index or 0}", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if which("nvidia-smi") else ""
    return {
        "name": properties.name,
        "driver": driver,
        "cuda": torch.version.cuda,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
    }


def lacks_gpu(name: str) -> bool:
    """Log and return whether a GPU or Triton is missing for the benchmark `name`."""
    lacking = [
        *(["an NVIDIA GPU"] if not torch.cuda.is_available() else []),
        *(["Triton"] if find_spec("triton") is None else []),
    ]
    if lacking:
        log(f"{name}.py lacks here: {'; '.join(lacking)}")
    return bool(lacking)


def run_benchmark(
    name: str, description: str | None, measure: Callable[[torch.device], Iterator[Row]], argv: Sequence[str] | None
) -> list[Row] | None:
    """Run a benchmark with the single option --json. Returns the rows; None without a GPU or Triton."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args(argv)
    if lacks_gpu(name):
        return None
    device, rows = torch.device("cuda", torch.cuda.current_device()), list[Row]()
    with torch.inference_mode():
        for row in measure(device):
            log(" ".join(f"{field}={value}" for field, value in row.items() if value != ""))
            rows.append(row)
    write_json(arguments.json, results_record(rows, ("torch", "triton"), gpu=gpu(device)))
    return rows


FILL_PAGES = 512
"""Number of pages to fill with random numbers at once."""


class DecodeInputs:
    """A random cache with pages in random order, and the bfloat16 inputs of one decode step.

    Static scales are 1, which fits normally distributed numbers. For another scale of the values, some peers would run an extra
    kernel that their format does not need.
    """

    def __init__(self, case: DecodeCase, storage: str, device: torch.device, seed: int) -> None:
        self.case, self.storage, self.layout = case, storage, case.layout(storage)
        self.scaling = 1 / math.sqrt(case.head_dim)
        rng = self.rng = torch.Generator(device).manual_seed(seed)
        pages = sum(case.page_counts)
        self.cache = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            for name, (dtype, shape) in self.layout.pools(pages).items()
        }
        for side, form in (("key", self.layout.key), ("value", self.layout.value)):
            if form.static:
                self.cache[f"{side}_scale"] = torch.ones(1, device=device)
            for first in range(0, pages, FILL_PAGES):
                count = min(FILL_PAGES, pages - first)
                x = torch.randn(count, PAGE_TOKENS, case.kv_heads, case.head_dim, generator=rng, device=device)
                codes, scales = reference.quantize(x, form, self.cache.get(f"{side}_scale"))
                self.cache[f"{side}_pool"][first : first + count] = codes.transpose(1, 2)
                if scales is not None:
                    self.cache[f"{side}_scale_pool"][first : first + count] = scales.transpose(1, 2)
        self.pages = torch.randperm(pages, generator=rng, device=device).int()
        """Page numbers of all sequences, concatenated."""
        self.page_table = torch.zeros(case.batch, case.pages, dtype=torch.int32, device=device)
        first = 0
        for b, count in enumerate(case.page_counts):
            self.page_table[b, :count] = self.pages[first : first + count]
            first += count
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        self.query = self._normal(case.q_heads)
        self.key_new, self.value_new = self._normal(case.kv_heads), self._normal(case.kv_heads)

    def _normal(self, heads: int) -> Tensor:
        shape = (self.case.batch, heads, self.case.head_dim)
        return torch.randn(shape, generator=self.rng, device=self.lengths.device).bfloat16()

    def expected(self, b: int, with_new: bool) -> Tensor:
        """Return the attention of sequence b in float32, (Hq, D), with or without the new token."""
        keys, values = reference.dequantize(self.layout, self.cache, self.page_table[b].long(), self.case.lengths[b])
        if with_new:
            keys = torch.cat([keys, self.key_new[b, :, None].float()], 1)
            values = torch.cat([values, self.value_new[b, :, None].float()], 1)
        query = self.query[b].float().view(self.case.kv_heads, self.case.group, -1)
        scores = query @ keys.mT * self.scaling
        return (scores.softmax(-1) @ values).flatten(0, 1)


@dataclass(frozen=True)
class KernelConfiguration:
    """One configuration of a kernel. The fastest candidate of a kernel counts."""

    prepare: Callable[[], Callable[[], Tensor]]
    """Returns a function that runs the kernel and returns (B, Hq, D). If one candidate of a peer fails, its other candidates
    still count."""
    chosen: str = ""
    """Label that distinguishes the candidate from the kernel's others."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that reads one storage."""

    name: str
    storage: str
    candidates: Callable[[DecodeInputs], Iterator[KernelConfiguration]]
    """Yields the candidates for a step, the default one first."""
    tolerance: float
    """Maximum relative L2 error of the outputs. Rounding to bfloat16 alone gives 1.7e-3 (at most 2^-9 per number)."""
    with_new: bool = False
    """Whether the kernel also attends to the new token, which is one token in thousands."""
    extra_copies: int = 0
    """Number of copies of the cache that the kernel allocates."""
    library: str | None = None
    """Package of a peer's kernel; None for kvgate's kernels. If the package is missing, the kernel is skipped. A peer's failure
    is recorded; a failure of kvgate's kernels is an error."""
    ragged: bool = True
    """Whether the kernel supports sequences of different lengths."""

    @property
    def peer(self) -> bool:
        """Whether the kernel belongs to a peer."""
        return self.library is not None


def relative_error(kernel: Kernel, step: DecodeInputs, out: Tensor) -> float:
    """Return the relative L2 error of out (B, Hq, D): the maximum over the first and the last sequence."""
    errors = []
    for b in {0, step.case.batch - 1}:
        expected = step.expected(b, kernel.with_new)
        errors.append(float((out[b].float() - expected).norm() / expected.norm()))
    return max(errors, key=lambda error: (math.isnan(error), error))


COPY_BYTES = 4 << 30
COPY_RUNS = 20
WARM_UP = 3
TUNING_RUNS = 5
MIN_RUNS, MAX_RUNS = 20, 200
TIMED_MICROSECONDS = 200_000
"""Total duration of the timed runs of one kernel in one case, within MIN_RUNS and MAX_RUNS."""
FLUSHED_L2 = 4
"""Multiple of the L2 cache's size that is read before every run to flush the cache."""
ROOM_BYTES = 4 << 30
"""Free memory reserved for workspaces, partial sums and fragmentation."""

Timer = Callable[[Callable[[], Tensor], int | None], tuple[float, Tensor]]
"""Takes a function that runs a kernel, and the number of runs (None: chosen from the time of one run). Returns the median
microseconds and the floating-point output of the last timed run."""


class GpuTimer:
    """Measures the median time over replays of a CUDA graph, between events, after a flush of the L2 cache.

    The flush reads memory, because written lines would have to be written back while the kernel runs. During the flush, the
    host enqueues the replay and its events, so that the times do not include waiting for a launch.
    """

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.zeros(FLUSHED_L2 * l2_bytes // 4, dtype=torch.int32, device=device)

    def __call__(self, run: Callable[[], Tensor], runs: int | None = None) -> tuple[float, Tensor]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        if runs is None:
            first = self._times(graph, TUNING_RUNS)
            runs = int(min(MAX_RUNS, max(MIN_RUNS, TIMED_MICROSECONDS / first)))
        # NaN in the output proves that the returned numbers come from the replays. The output is copied because its memory is
        # freed with the graph.
        out.fill_(torch.nan)
        microseconds = self._times(graph, runs)
        return microseconds, out.clone()

    def _times(self, graph: torch.cuda.CUDAGraph, runs: int) -> float:
        events: list[list[Any]] = [[_event(), _event()] for _ in range(runs)]
        for start, end in events:
            self._flushed.amax()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        milliseconds: list[float] = [start.elapsed_time(end) for start, end in events]
        return 1e3 * median(milliseconds)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_rate(timer: Timer, device: torch.device) -> float:
    """Return the bytes per second of a copy by a kernel, bytes read and written together.

    A kernel is used because a CUDA graph's copy node moved only 2.8 TB/s on an H200, and SDPA 4.4 TB/s (benchmarks/results).
    """
    source = torch.rand(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    microseconds, copied = timer(lambda: torch.mul(source, 1.0, out=target), COPY_RUNS)
    if not torch.equal(copied, source):
        raise RuntimeError("the timed copy did not copy the data, so its rate cannot be used")
    return 2 * COPY_BYTES / (microseconds * 1e-6)


def run_case(
    case: DecodeCase, kernels: Sequence[Kernel], timer: Timer, device: torch.device, copy_bytes_per_s: float, seed: int
) -> list[Row]:
    """Measure and check every kernel on fresh random inputs.

    Returns:
        A row per kernel, with its figures or the reason why it was skipped.
    """
    rows: list[Row] = []
    for storage in attention_cases.STORAGES:
        step: DecodeInputs | None = None
        for kernel in (kernel for kernel in kernels if kernel.storage == storage):
            row = {**case.describe(), "kernel": kernel.name, "storage": storage, "peer": kernel.peer}
            copies = kernel.extra_copies + (step is None)
            reason = _unavailable(kernel, case) or _does_not_fit(case, copies * case.allocated_bytes(storage), device)
            if reason is not None:
                rows.append(row | {"skipped": reason})
                continue
            step = step or DecodeInputs(case, storage, device, seed)
            rows.append(row | _measure(kernel, step, timer, copy_bytes_per_s))
    attention_cases.add_ratios(rows)
    return rows


def _unavailable(kernel: Kernel, case: DecodeCase) -> str | None:
    """Return the reason why a kernel cannot run on this machine or for this case; None if it can."""
    if kernel.library is not None and find_spec(kernel.library) is None:
        return f"{kernel.library} is not installed"
    return None if kernel.ragged or not case.ragged else "takes sequences of one length only"


def _measure(kernel: Kernel, step: DecodeInputs, timer: Timer, copy_bytes_per_s: float) -> Row:
    """Time the fastest candidate of the kernel again with more runs, and check the output of the last run.

    If a peer fails to prepare or run, the row has a reason instead of figures. Failures of kvgate's kernels are raised.
    """
    tried: list[tuple[float, Callable[[], Tensor], KernelConfiguration]] = []
    failed: list[str] = []
    try:
        for candidate in kernel.candidates(step):
            try:
                run = candidate.prepare()
                tried.append((timer(run, TUNING_RUNS)[0], run, candidate))
            except Exception as failure:
                if not kernel.peer:
                    raise
                failed.append(f"{candidate.chosen} {_reason(failure)}".strip())
        if not tried:
            return {"skipped": f"failed: {failed[0]}", "failed": failed}
        _, run, best = min(tried, key=lambda timed: timed[0])
        microseconds, out = timer(run, None)
    except Exception as failure:
        if not kernel.peer:
            raise
        return {"skipped": f"failed: {_reason(failure)}", "failed": failed}
    error = relative_error(kernel, step, out)
    return attention_cases.measured(step.case, step.storage, microseconds, copy_bytes_per_s) | {
        "relative_error": error,
        "correct": error <= kernel.tolerance,
        "chosen": best.chosen,
        "tried": {candidate.chosen: time for time, _, candidate in tried},
        "failed": failed,
    }


def _reason(error: Exception) -> str:
    """Return the error as one line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:200]


def _does_not_fit(case: DecodeCase, needed: int, device: torch.device) -> str | None:
    """Return the reason if `needed` bytes, the check and ROOM_BYTES exceed the device's free memory, else None."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    needed += ROOM_BYTES + 8 * 4 * case.tokens * case.kv_heads * case.head_dim
    return None if needed <= free else f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
