"""Static cost of a compiled kernel: the instructions of its main loop, and the cycles each pipe of an SM needs for them.

Nothing here is measured. A figure is a lower bound: it assumes that some warp can always issue (scoreboard.py asks whether one
can) and that shared memory has no bank conflicts. Rates are those of compute capability 9.0 in NVIDIA's CUDA C++ Programming
Guide ("Throughput of Native Arithmetic Instructions"), and for matrix instructions those of an A100, which Hopper exceeds.
Shared memory and L1 are one array, so global loads count as its wavefronts too. The opcode UTCHMMA does not tell its shape:
see `uncounted`.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triton import knobs

PER_CYCLE = {"issue": 4.0, "alu": 2.0, "mufu": 0.5, "tensor": 0.5, "shared": 1.0}
"""Warp instructions that each pipe of an SM accepts per cycle; for shared memory and L1, wavefronts of 128 bytes."""

ALU = {
    *("LOP3", "SHF", "PRMT", "IADD3", "VIADD", "ISETP", "LEA", "SEL", "FSEL", "FMNMX", "HMNMX2", "FSETP", "IMNMX", "VIMNMX"),
    *("PLOP3", "F2FP", "MOV", "CS2R", "R2P", "IABS"),
}
"""Opcodes of the 64-lane pipe: integers, bits, comparisons, packing."""
MATRIX = ("HMMA", "HGMMA", "UTCHMMA")
"""Matrix instructions: executed by one warp, by four warps (sm_90), by a whole block (sm_100)."""
COPIES = ("LDG", "LDGSTS")
"""Loads from global memory: to registers, and asynchronous copies to shared memory."""
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""Bytes per thread of a load or store, by the opcode's last modifier; others have 4."""
WAVEFRONTS = {"": 1, "64": 2, "128": 4}
"""Wavefronts of a load or store of 4, 8 and 16 bytes per thread, by the opcode's last modifier."""

LINE = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,5})\*/\s+(?P<text>.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x(?P<control>[0-9a-f]{16}) \*/",
    re.MULTILINE,
)
"""An instruction in cuobjdump's listing, and the upper half of its encoding."""


@dataclass(frozen=True)
class Instruction:
    """A machine instruction, and what ptxas tells the scheduler with it (the same bits from sm_70 to sm_100)."""

    address: int
    text: str
    stall: int = 1
    """Cycles until the warp's next instruction may issue."""
    write: int | None = None
    """Scoreboard, 0 to 5, that is held until the result is there."""
    read: int | None = None
    """Scoreboard that is held until the operands have been read."""
    wait: int = 0
    """Scoreboards, one bit each, that must be free before the instruction issues."""

    @property
    def opcode(self) -> str:
        """The opcode without its predicate: `@P0 LDG.E.128 R4, ...` -> `LDG.E.128`."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @property
    def base(self) -> str:
        """The opcode without modifiers: LDG."""
        return self.opcode.split(".")[0]

    @property
    def guarded(self) -> bool:
        """Whether the instruction is under a predicate."""
        return self.text.startswith("@")

    @property
    def never(self) -> bool:
        """Whether the predicate is constantly false: ptxas puts such loads before copies as spacers."""
        return self.text.startswith("@!PT")

    @property
    def target(self) -> int | None:
        """Address that a branch goes to."""
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", self.text)
        return int(branch[1], 16) if branch else None

    @property
    def copied_bytes(self) -> int:
        """Bytes that a warp loads from global memory by this instruction."""
        return 32 * WIDTHS.get(self.opcode.split(".")[-1], 4) if self.base in COPIES and not self.never else 0


@dataclass(frozen=True)
class LoopCost:
    """Cost of a kernel's main loop."""

    instructions: int
    """Instructions that one warp executes per iteration."""
    counts: dict[str, int]
    """Instructions by base opcode."""
    loads: dict[str, int]
    """Loads from global memory, by opcode: LDG.E.128, LDGSTS.E.BYPASS.128, ..."""
    cycles: dict[str, float]
    """Cycles of an SM per (token, KV head), by the pipes of PER_CYCLE."""

    @property
    def uncounted(self) -> int:
        """Matrix instructions that `cycles` do not include."""
        return self.counts.get("UTCHMMA", 0)

    def streamed_bytes(self, num_warps: int) -> int:
        """Return the bytes that a block loads per iteration by asynchronous copies or by 16 bytes per thread."""
        streamed = {name: count for name, count in self.loads.items() if name.startswith("LDGSTS") or name.endswith(".128")}
        return 32 * num_warps * sum(count * WIDTHS.get(name.split(".")[-1], 4) for name, count in streamed.items())

    @property
    def bound(self) -> float:
        """Cycles of the slowest pipe."""
        return max(self.cycles.values())


def disassemble(cubin: bytes) -> list[Instruction]:
    """Return the instructions of a cubin's only kernel, by the cuobjdump that Triton ships."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        process = subprocess.run(command, capture_output=True, text=True, check=True, env={"TMPDIR": folder})
    return parse(process.stdout)


def parse(listing: str) -> list[Instruction]:
    """Return the instructions of cuobjdump's listing of a kernel."""
    return [_instruction(found["address"], found["text"], int(found["control"], 16)) for found in LINE.finditer(listing)]


def _instruction(address: str, text: str, control: int) -> Instruction:
    write, read = control >> 46 & 7, control >> 49 & 7
    return Instruction(
        int(address, 16),
        text,
        stall=control >> 41 & 15,
        write=None if write == 7 else write,
        read=None if read == 7 else read,
        wait=control >> 52 & 63,
    )


def main_loop(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return the instructions of the loop over whole tiles, found by what it does.

    Of the innermost loops with matrix instructions it is the one that loads most without asking, token by token, whether it
    may: by copies, or by loads under no predicate. The loop over ragged tiles and the one over exact tokens load every row
    under a predicate of its own.

    Raises:
        ValueError: No loop has matrix instructions.
    """
    loops = []
    for last in instructions:
        if last.target is not None and last.target < last.address:
            body = [inner for inner in instructions if last.target <= inner.address <= last.address]
            if any(inner.base in MATRIX for inner in body):
                loops.append(body)
    innermost = [body for body in loops if not any(other is not body and set(other) < set(body) for other in loops)]
    if not innermost:
        raise ValueError("no loop with matrix instructions")
    return max(innermost, key=_freely_loaded)


def _freely_loaded(body: Sequence[Instruction]) -> int:
    return sum(inner.copied_bytes for inner in body if inner.base == "LDGSTS" or not inner.guarded)


def loop_cost(body: Sequence[Instruction], *, num_warps: int, tokens: int) -> LoopCost:
    """Return the cost of a kernel's main loop.

    Args:
        body: Its instructions.
        num_warps: Warps of a block.
        tokens: Tokens of one KV head that a block processes per iteration.
    """
    opcodes = [instruction.opcode for instruction in body]
    counts = Counter(instruction.base for instruction in body)
    work = {
        "issue": len(body),
        "alu": sum(counts[name] for name in ALU),
        "mufu": counts["MUFU"],
        "tensor": sum(map(products, opcodes)),
        "shared": sum(wavefronts(instruction) for instruction in body),
    }
    loads = Counter(instruction.opcode for instruction in body if instruction.copied_bytes)
    cycles = {pipe: amount * num_warps / PER_CYCLE[pipe] / tokens for pipe, amount in work.items()}
    return LoopCost(len(body), dict(counts), dict(loads), cycles)


def products(name: str) -> int:
    """Return the matrix products of 16 x 16 by 16 x 8 that an opcode performs per warp."""
    base, *modifiers = name.split(".")
    if base == "HGMMA":
        # Four warps multiply 64 x 16 by 16 x N; the modifier is 64xNx16.
        shape = next(modifier for modifier in modifiers if modifier.count("x") == 2)
        return int(shape.split("x")[1]) // 8
    return int(base == "HMMA")


def wavefronts(instruction: Instruction) -> int:
    """Return the wavefronts of shared memory and L1 that an instruction takes per warp."""
    base, *modifiers = instruction.opcode.split(".")
    last = modifiers[-1] if modifiers else ""
    if instruction.never:
        return 0
    if base in ("LDS", "STS", *COPIES):
        return WAVEFRONTS.get(last, 1)
    if base in ("LDSM", "STSM"):
        return int(last) if last.isdigit() else 1
    return 1 if base == "SHFL" else 0
