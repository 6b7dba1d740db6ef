"""How decode_attention.py times a kernel: the fastest of its candidates, over fresh random inputs, checked in the same run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks import attention_cases
from benchmarks.attention_cases import Case, Row
from benchmarks.attention_kernels import Candidate, Kernel, Step, relative_error, why_not

COPY_BYTES = 4 << 30
COPY_RUNS = 20
WARM_UP = 3
TUNING_RUNS = 5
MIN_RUNS, MAX_RUNS = 20, 200
TIMED_MICROSECONDS = 200_000
"""Of runs of one kernel in one case, as long as the bounds of their number allow."""
FLUSHED_L2 = 4
"""How many times the L2 cache is read over before each run."""
ROOM_BYTES = 4 << 30
"""Left free: workspaces, partial sums, memory in pieces."""

Timer = Callable[[Callable[[], Tensor], int | None], tuple[float, Tensor]]
"""Median microseconds of a kernel that gives floating-point numbers, and what its last timed run gave; None runs are chosen
by what one takes."""


@dataclass(frozen=True)
class Place:
    """Where it runs, and how fast that copies."""

    device: torch.device
    copy_bytes_per_s: float


class GpuTimer:
    """Medians over replays of a CUDA graph, between events, with the L2 cache full of something else.

    Flushing reads: what was written would have to be written back while the kernel runs. And while it goes on, the host
    enqueues what follows, so that no launch is waited for between two events.
    """

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.zeros(FLUSHED_L2 * l2_bytes // 4, dtype=torch.int32, device=device)

    def __call__(self, run: Callable[[], Tensor], runs: int | None = None) -> tuple[float, Tensor]:
        side = torch.cuda.Stream()
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
        # What is there afterwards, the replays have written. The graph's memory goes with the graph: hence the copy.
        out.fill_(torch.nan)
        microseconds = self._times(graph, runs)
        return microseconds, out.clone()

    def _times(self, graph: torch.cuda.CUDAGraph, runs: int) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for start, end in events:
            self._other.amax()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return median(1e3 * start.elapsed_time(end) for start, end in events)


def copy_rate(timer: Timer, device: torch.device) -> float:
    """Bytes per second of a device-to-device copy, read and written ones together."""
    source = torch.rand(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    microseconds, copied = timer(lambda: target.copy_(source), COPY_RUNS)
    if not torch.equal(copied, source):
        raise RuntimeError("the copy that was timed did not copy: nothing can be measured against it")
    return 2 * COPY_BYTES / (microseconds * 1e-6)


def run_case(case: Case, kernels: Sequence[Kernel], timer: Timer, place: Place, seed: int) -> list[Row]:
    """A row for every kernel: measured over fresh random inputs and checked, or why it was left out."""
    rows: list[Row] = []
    for storage in attention_cases.STORAGES:
        step: Step | None = None
        for kernel in (kernel for kernel in kernels if kernel.storage == storage):
            row = {**case.describe(), "kernel": kernel.name, "storage": storage}
            copies = kernel.extra_copies + (step is None)
            reason = why_not(kernel) or _does_not_fit(case, copies * case.allocated_bytes(storage), place.device)
            if reason is not None:
                rows.append(row | {"skipped": reason})
                continue
            step = step or Step(case, storage, place.device, seed)
            rows.append(row | _measure(kernel, step, timer, place.copy_bytes_per_s))
    attention_cases.add_ratios(rows)
    return rows


def _measure(kernel: Kernel, step: Step, timer: Timer, copy_bytes_per_s: float) -> Row:
    """The fastest of the kernel's candidates, timed again with more runs, of which the last one's output is checked.

    A peer that fails, when it is made or when it runs, has a reason instead; ours raise.
    """
    tried: list[tuple[float, Callable[[], Tensor], Candidate]] = []
    failed: list[Row] = []
    candidates = kernel.candidates(step)
    while True:
        chosen: Row = {}
        try:
            candidate = next(candidates, None)
            if candidate is None:
                break
            chosen = candidate.chosen
            run = candidate.prepare()
            tried.append((timer(run, TUNING_RUNS)[0], run, candidate))
        except Exception as failure:
            # Ours are tuned beyond what a GPU's shared memory and registers hold; what is shipped must run.
            tuning = isinstance(failure, OutOfResources) and tried
            if not kernel.peer and not tuning:
                raise
            failed.append({**chosen, "reason": _reason(failure)})
    if not tried:
        return {"skipped": f"failed: {failed[0]['reason']}", "failed": failed}
    _, run, best = min(tried, key=lambda one: one[0])
    try:
        microseconds, out = timer(run, None)
    except Exception as failure:
        if not kernel.peer:
            raise
        failed.append({**best.chosen, "reason": _reason(failure)})
        return {"skipped": f"failed: {_reason(failure)}", "failed": failed}
    error = relative_error(kernel, step, out)
    return attention_cases.measured(step.case, step.storage, microseconds, copy_bytes_per_s) | {
        "relative_error": error,
        "correct": error <= kernel.tolerance,
        "chosen": best.chosen,
        "tried": [{**candidate.chosen, "microseconds": time} for time, _, candidate in tried],
        "failed": failed,
    }


def _reason(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:200]


def _does_not_fit(case: Case, needed: int, device: torch.device) -> str | None:
    """Why `needed` bytes, what checking takes and some room besides are more than is left of the device's memory."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    needed += ROOM_BYTES + 8 * 4 * case.tokens * case.kv_heads * case.head_dim
    return None if needed <= free else f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
