"""Timing of decode_attention.py: the fastest candidate of each kernel, over fresh random inputs, checked in the same run."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import attention_cases
from benchmarks.attention_cases import Case, Row
from benchmarks.attention_step import Candidate, Kernel, Step, relative_error

COPY_BYTES = 4 << 30
COPY_RUNS = 20
WARM_UP = 3
TUNING_RUNS = 5
MIN_RUNS, MAX_RUNS = 20, 200
TIMED_MICROSECONDS = 200_000
"""Duration that the runs of one kernel in one case add up to, within MIN_RUNS and MAX_RUNS."""
FLUSHED_L2 = 4
"""Multiple of the L2 cache's size that is read before each run to flush it."""
ROOM_BYTES = 4 << 30
"""Memory that is left free for workspaces, partial sums and fragmentation."""

Timer = Callable[[Callable[[], Tensor], int | None], tuple[float, Tensor]]
"""Takes a function that runs a kernel, and the number of runs or None to choose it by the time of one. Returns the median
microseconds and the floating-point output of the last timed run."""


class GpuTimer:
    """Medians over replays of a CUDA graph, between events, after a flush of the L2 cache.

    The flush reads memory, because written lines would have to be written back while the kernel runs. While the flush runs,
    the host enqueues the rest, so that no launch is waited for between two events.
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
        # The output is filled with NaN so that the returned numbers are from the replays. It is copied because its memory is
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

    A graph's own node for a copy moved 2.8 TB/s on an H200 on which SDPA moved 4.4 (benchmarks/results).
    """
    source = torch.rand(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    microseconds, copied = timer(lambda: torch.mul(source, 1.0, out=target), COPY_RUNS)
    if not torch.equal(copied, source):
        raise RuntimeError("the copy that was timed did not copy: nothing can be measured against it")
    return 2 * COPY_BYTES / (microseconds * 1e-6)


def run_case(
    case: Case, kernels: Sequence[Kernel], timer: Timer, device: torch.device, copy_bytes_per_s: float, seed: int
) -> list[Row]:
    """Measure and check every kernel over fresh random inputs.

    Returns:
        A row per kernel, with its figures or with the reason why it was skipped.
    """
    rows: list[Row] = []
    for storage in attention_cases.STORAGES:
        step: Step | None = None
        for kernel in (kernel for kernel in kernels if kernel.storage == storage):
            row = {**case.describe(), "kernel": kernel.name, "storage": storage, "peer": kernel.peer}
            copies = kernel.extra_copies + (step is None)
            reason = _unavailable(kernel, case) or _does_not_fit(case, copies * case.allocated_bytes(storage), device)
            if reason is not None:
                rows.append(row | {"skipped": reason})
                continue
            step = step or Step(case, storage, device, seed)
            rows.append(row | _measure(kernel, step, timer, copy_bytes_per_s))
    attention_cases.add_ratios(rows)
    return rows


def _unavailable(kernel: Kernel, case: Case) -> str | None:
    """Why a kernel cannot run on this machine or over these sequences, None when it can."""
    if kernel.library is not None and find_spec(kernel.library) is None:
        return f"{kernel.library} is not installed"
    return None if kernel.ragged or not case.ragged else "takes sequences of one length only"


def _measure(kernel: Kernel, step: Step, timer: Timer, copy_bytes_per_s: float) -> Row:
    """Time the fastest of the kernel's candidates again with more runs, and check the output of the last one.

    A peer that fails, when it is prepared or when it runs, gets a reason instead of figures. A kernel of kvgate raises.
    """
    tried: list[tuple[float, Callable[[], Tensor], Candidate]] = []
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
    """The error in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:200]


def _does_not_fit(case: Case, needed: int, device: torch.device) -> str | None:
    """Reason why `needed` bytes, the memory of the check and ROOM_BYTES exceed the device's free memory, or None."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    needed += ROOM_BYTES + 8 * 4 * case.tokens * case.kv_heads * case.head_dim
    return None if needed <= free else f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
