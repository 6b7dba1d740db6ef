"""What a compiled kernel costs on paper: the instructions of its main loop, and the cycles each pipe of an SM needs for them.

Nothing here is measured. A figure is a lower bound: it assumes that some warp can always issue and that shared memory has no
bank conflicts. Rates are those of compute capability 9.0 in NVIDIA's CUDA C++ Programming Guide ("Throughput of Native
Arithmetic Instructions"), and for matrix instructions those of an A100, which Hopper exceeds. Shared memory and L1 are one
array: what global loads bring through it counts as its wavefronts too. UTCHMMA's work is not in its opcode: see `uncounted`.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from triton import knobs

PER_CYCLE = {"issue": 4.0, "alu": 2.0, "mufu": 0.5, "tensor": 0.5, "shared": 1.0}
"""Warp instructions that an SM takes in a cycle; of shared memory and L1, wavefronts of 128 bytes."""

ALU = {
    *("LOP3", "SHF", "PRMT", "IADD3", "VIADD", "ISETP", "LEA", "SEL", "FSEL", "FMNMX", "HMNMX2", "FSETP", "IMNMX", "VIMNMX"),
    *("PLOP3", "F2FP", "MOV", "CS2R", "R2P", "IABS"),
}
"""Opcodes of the pipe of 64 lanes: integers, bits, comparisons, packing."""
MATRIX = ("HMMA", "HGMMA", "UTCHMMA")
"""Opcodes of matrix instructions: of a warp, of four warps (sm_90), of a whole block (sm_100)."""
WAVEFRONTS = {"": 1, "64": 2, "128": 4}
"""Of a load or store of 4, 8 and 16 bytes a thread."""


@dataclass(frozen=True)
class LoopCost:
    """The main loop of a kernel."""

    instructions: int
    """Of one warp and pass."""
    counts: dict[str, int]
    """By base opcode."""
    loads: dict[str, int]
    """Loads from global memory, by opcode: LDG.E.128, LDGSTS.E.BYPASS.128, ..."""
    cycles: dict[str, float]
    """Of an SM per (token, KV head), by pipe: PER_CYCLE's."""

    @property
    def uncounted(self) -> int:
        """Matrix instructions that `cycles` leave out."""
        return self.counts.get("UTCHMMA", 0)

    def wide_bytes(self, num_warps: int) -> int:
        """Bytes that loads of 16 bytes a thread bring to a block in one pass."""
        return 16 * 32 * num_warps * sum(count for name, count in self.loads.items() if name.endswith(".128"))

    @property
    def bound(self) -> float:
        """Cycles of the slowest pipe."""
        return max(self.cycles.values())


def disassemble(cubin: bytes) -> list[tuple[int, str]]:
    """(address, instruction) of the only kernel of a cubin, by the cuobjdump that Triton carries."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([knobs.nvidia.cuobjdump.path, "-sass", str(path)], capture_output=True, text=True, check=True)
    found = re.findall(r"^\s*/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;", done.stdout, re.MULTILINE)
    return [(int(address, 16), text) for address, text in found]


def main_loop(instructions: list[tuple[int, str]]) -> list[str]:
    """Of the loops that load a page number, those with most matrix instructions, the shortest: the loop of ragged tiles has
    as many, and masks besides; that of exact tokens reads no page table.

    ValueError if there is none.
    """
    loops = []
    for address, text in instructions:
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if branch is not None and (start := int(branch[1], 16)) < address:
            body = [inner for place, inner in instructions if start <= place <= address]
            opcodes = [opcode(inner) for inner in body]
            matrix = sum(name.split(".")[0] in MATRIX for name in opcodes)
            loops.append((not {"LDG.E", "LDGSTS.E"} & set(opcodes), -matrix, len(body), body))
    _, found, _, body = min(loops, default=(True, 0, 0, []))
    if not found:
        raise ValueError("no loop with matrix instructions")
    return body


def opcode(text: str) -> str:
    """`@P0 LDG.E.128 R4, ...` -> `LDG.E.128`."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def loop_cost(cubin: bytes, *, num_warps: int, tokens: int) -> LoopCost:
    """Cost of the main loop of a kernel of which a block does `tokens` tokens of one KV head a pass."""
    opcodes = [opcode(text) for text in main_loop(disassemble(cubin))]
    counts = Counter(name.split(".")[0] for name in opcodes)
    work = {
        "issue": len(opcodes),
        "alu": sum(counts[name] for name in ALU),
        "mufu": counts["MUFU"],
        "tensor": sum(map(_products, opcodes)),
        "shared": sum(map(_wavefronts, opcodes)),
    }
    loads = Counter(name for name in opcodes if name.split(".")[0] in ("LDG", "LDGSTS"))
    cycles = {pipe: amount * num_warps / PER_CYCLE[pipe] / tokens for pipe, amount in work.items()}
    return LoopCost(len(opcodes), dict(counts), dict(loads), cycles)


def _products(name: str) -> int:
    """Products of 16 x 16 by 16 x 8, for one warp."""
    base, *modifiers = name.split(".")
    if base == "HGMMA":
        # 64 x N x 16 by four warps: modifier 64xNx16.
        shape = next(modifier for modifier in modifiers if modifier.count("x") == 2)
        return int(shape.split("x")[1]) // 8
    return int(base == "HMMA")


def _wavefronts(name: str) -> int:
    """Of shared memory and L1, for one warp."""
    base, *modifiers = name.split(".")
    last = modifiers[-1] if modifiers else ""
    if base in ("LDS", "STS", "LDG", "LDGSTS"):
        return WAVEFRONTS.get(last, 1)
    if base in ("LDSM", "STSM"):
        return int(last) if last.isdigit() else 1
    return 1 if base == "SHFL" else 0
