"""Counted facts of a compiled kernel: the instructions of its main loop and the loads among them. Nothing is measured."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triton import knobs

MATRIX = ("HMMA", "HGMMA", "UTCHMMA")
"""Matrix instructions: executed by one warp, by four warps (sm_90), by a whole block (sm_100)."""
COPIES = ("LDG", "LDGSTS")
"""Loads from global memory: to registers, and asynchronous copies to shared memory."""
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""Bytes per thread of a load, by the opcode's last modifier; others have 4."""

LINE = re.compile(r"^\s*/\*(?P<address>[0-9a-f]{4,5})\*/\s+(?P<text>.*?)\s*;", re.MULTILINE)
"""An instruction in cuobjdump's listing."""


@dataclass(frozen=True)
class Instruction:
    """A machine instruction."""

    address: int
    text: str

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
    def target(self) -> int | None:
        """Address that a branch goes to."""
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", self.text)
        return int(branch[1], 16) if branch else None

    @property
    def copied_bytes(self) -> int:
        """Bytes that a warp loads from global memory by this instruction.

        ptxas puts loads under a constantly false predicate (`@!PT`) before copies as spacers, which load nothing.
        """
        if self.base not in COPIES or self.text.startswith("@!PT"):
            return 0
        return 32 * WIDTHS.get(self.opcode.split(".")[-1], 4)


@dataclass(frozen=True)
class Loop:
    """A kernel's main loop."""

    instructions: int
    """Instructions that one warp executes per iteration."""
    loads: dict[str, int]
    """Loads from global memory, by opcode: LDG.E.128, LDGSTS.E.BYPASS.128, ..."""

    def streamed_bytes(self, num_warps: int) -> int:
        """Return the bytes that a block loads per iteration by asynchronous copies or by 16 bytes per thread."""
        streamed = {name: count for name, count in self.loads.items() if name.startswith("LDGSTS") or name.endswith(".128")}
        return 32 * num_warps * sum(count * WIDTHS.get(name.split(".")[-1], 4) for name, count in streamed.items())


def kernel_loop(cubin: bytes) -> Loop:
    """Return the main loop of a cubin's only kernel, by the cuobjdump that Triton ships."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        process = subprocess.run(command, capture_output=True, text=True, check=True, env={"TMPDIR": folder})
    return count(main_loop(parse(process.stdout)))


def parse(listing: str) -> list[Instruction]:
    """Return the instructions of cuobjdump's listing of a kernel."""
    return [Instruction(int(found["address"], 16), found["text"]) for found in LINE.finditer(listing)]


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


def count(body: Sequence[Instruction]) -> Loop:
    """Return the counts of a loop's instructions."""
    return Loop(len(body), dict(Counter(instruction.opcode for instruction in body if instruction.copied_bytes)))
