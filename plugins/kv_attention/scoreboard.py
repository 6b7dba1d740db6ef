"""How fast a compiled loop runs when its loads take a given latency: a model of issue and of scoreboards. Nothing is measured.

Every warp that fits an SM executes the loop's instructions in order. An instruction issues when the stall count of the one
before it has passed, the scoreboards that it waits for are free, and its scheduler and its pipe are not busy; all of that
stands in the machine code. A copy from global memory takes a fixed latency, that of a memory under load, however many are
under way: DRAM's own bandwidth is left out, so that the result is a ceiling of what latency and issue allow, which the
memory may lie below. Left out as well are the instruction cache, bank conflicts, clocks, the launch, and a branch inside the
loop, which is never taken, so that all that it could skip is counted.
"""

import heapq
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from plugins.kv_attention.sass import ALU, COPIES, MATRIX, Instruction, products, wavefronts

SCHEDULERS = 4
"""Parts of an SM, each of which issues one warp instruction per cycle and has pipes of its own."""

LATENCY = {"LDS": 29, "LDSM": 33, "SHFL": 24, "MUFU": 23, "STS": 20, "STSM": 20, "BAR": 20, "LDC": 30, "S2R": 30, "S2UR": 30}
"""Assumed cycles until a result is there. That of shared memory was published for H100 (29 cycles, arXiv 2402.13499); the
others are of the same order. Instructions without a scoreboard have a fixed latency, which is in the stall counts."""
OTHER_LATENCY = 20
READ_LATENCY = 20
"""Cycles until an instruction has read its operands."""
JUMP = 10
"""Cycles from the branch at the loop's end to its first instruction."""

WARM, MEASURED = 3, 6
"""Iterations of every program before and during the measurement."""
STAGGER, SPREAD = 97, 1000
"""Cycles between the programs' starts, and within which all start."""


@dataclass
class _Warp:
    program: int
    scheduler: int
    position: int = 0
    iteration: int = 0
    free: dict[int, float] = field(default_factory=dict)
    """When each scoreboard is free."""
    copies: float = 0.0
    """When the last asynchronous copy so far arrives."""
    groups: deque[float] = field(default_factory=deque)
    """When each committed group of asynchronous copies arrives."""


@dataclass
class _Machine:
    """The parts of an SM that warps share, each with the cycle from which it is free."""

    issue: list[float] = field(default_factory=lambda: [0.0] * SCHEDULERS)
    pipes: dict[tuple[str, int], float] = field(default_factory=dict)
    shared: float = 0.0


def cycles_per_iteration(body: Sequence[Instruction], *, programs: int, num_warps: int, latency: float) -> float:
    """Return the cycles that a program takes for an iteration when `programs` run on an SM, each with `num_warps` warps.

    Args:
        body: Instructions of the loop.
        programs: Programs (blocks) that the SM runs at once.
        num_warps: Warps of each.
        latency: Cycles of a load from global memory.
    """
    steps = [_Step.of(instruction) for instruction in body]
    warps = [_Warp(p, (p * num_warps + w) % SCHEDULERS) for p in range(programs) for w in range(num_warps)]
    machine = _Machine()
    waiting: dict[int, list[int]] = {}
    reached: dict[int, list[float]] = {p: [] for p in range(programs)}
    queue = [(float(STAGGER * warp.program % SPREAD), number) for number, warp in enumerate(warps)]
    while min(map(len, reached.values())) <= WARM + MEASURED:
        now, number = heapq.heappop(queue)
        warp = warps[number]
        step = steps[warp.position]
        start = max(now, _ready(warp, step), machine.issue[warp.scheduler])
        if step.pipe:
            start = max(start, machine.pipes.get((step.pipe, warp.scheduler), 0.0))
        if start > now:
            heapq.heappush(queue, (start, number))
            continue
        machine.issue[warp.scheduler] = now + 1
        if step.pipe:
            machine.pipes[step.pipe, warp.scheduler] = now + step.interval
        if step.barrier and num_warps > 1:
            arrived = waiting.setdefault(warp.program, [])
            arrived.append(number)
            if len(arrived) == num_warps:
                for other in waiting.pop(warp.program):
                    heapq.heappush(queue, (now + LATENCY["BAR"], _advance(warps[other], steps, reached, now, other)))
            continue
        _execute(warp, step, machine, now, latency)
        pause = max(1, step.stall) + (LATENCY["BAR"] if step.barrier else 0)
        if warp.position == len(steps) - 1:
            pause += JUMP
        heapq.heappush(queue, (now + pause, _advance(warp, steps, reached, now, number)))
    return sum((times[WARM + MEASURED] - times[WARM]) / MEASURED for times in reached.values()) / programs


@dataclass(frozen=True)
class _Step:
    """What the model needs to know of an instruction."""

    stall: int
    write: int | None
    read: int | None
    waits: tuple[int, ...]
    pipe: str
    interval: float
    wavefronts: int
    latency: float | None
    """Cycles until the result; None for a copy from global memory."""
    asynchronous: bool
    commit: bool
    pending: int | None
    """Groups of copies that may still be under way when a DEPBAR lets the warp go on."""
    barrier: bool

    @classmethod
    def of(cls, instruction: Instruction) -> "_Step":
        base = instruction.base
        pending = re.search(r"DEPBAR\.LE SB\d, 0x([0-9a-f]+)", instruction.text)
        copies = base in COPIES and not instruction.never
        pipe, interval = _pipe(instruction)
        return cls(
            stall=instruction.stall,
            write=instruction.write,
            read=instruction.read,
            waits=tuple(board for board in range(6) if instruction.wait >> board & 1),
            pipe=pipe,
            interval=interval,
            wavefronts=wavefronts(instruction),
            latency=None if copies else LATENCY.get(base, OTHER_LATENCY),
            asynchronous=copies and base == "LDGSTS",
            commit=base == "LDGDEPBAR",
            pending=int(pending[1], 16) if pending else None,
            barrier=base == "BAR",
        )


def _pipe(instruction: Instruction) -> tuple[str, float]:
    """Return the scheduler's pipe that an instruction occupies, and for how many cycles; "" where none is scarce."""
    if instruction.base in MATRIX:
        return "tensor", 8.0 * products(instruction.opcode)
    if instruction.base == "MUFU":
        return "mufu", 8.0
    if instruction.base in ALU:
        return "alu", 2.0
    return "", 0.0


def _ready(warp: _Warp, step: _Step) -> float:
    """Return the cycle in which all is there that an instruction waits for."""
    ready = max((warp.free.get(board, 0.0) for board in step.waits), default=0.0)
    if step.pending is not None and len(warp.groups) > step.pending:
        ready = max(ready, warp.groups[-step.pending - 1])
    return ready


def _execute(warp: _Warp, step: _Step, machine: _Machine, now: float, latency: float) -> None:
    """Hold the scoreboards and the shared pipe that an instruction holds."""
    begin = now
    if step.wavefronts:
        begin = max(now, machine.shared)
        machine.shared = begin + step.wavefronts
    done = begin + step.wavefronts + (latency if step.latency is None else step.latency)
    if step.asynchronous:
        warp.copies = max(warp.copies, done)
    if step.commit:
        # Groups arrive in order.
        warp.groups.append(max(warp.copies, now, warp.groups[-1] if warp.groups else 0.0))
        if len(warp.groups) > 64:
            warp.groups.popleft()
    if step.write is not None and not step.commit:
        # The scoreboard of an asynchronous copy or store only says that its operands have been read.
        held = begin + READ_LATENCY if step.asynchronous else done
        warp.free[step.write] = max(warp.free.get(step.write, 0.0), held)
    if step.read is not None:
        warp.free[step.read] = max(warp.free.get(step.read, 0.0), begin + READ_LATENCY)


def _advance(warp: _Warp, steps: Sequence[_Step], reached: dict[int, list[float]], now: float, number: int) -> int:
    """Move a warp to its next instruction. Returns its number. The last warp of a program to end an iteration dates it."""
    warp.position += 1
    if warp.position == len(steps):
        warp.position = 0
        times = reached[warp.program]
        if warp.iteration == len(times):
            times.append(now)
        times[warp.iteration] = now
        warp.iteration += 1
    return number
