"""Static cost of a compiled kernel: the instructions of its main loop, and the cycles each pipe of an SM needs for them.

Nothing here is measured. A figure is a lower bound: it assumes that some warp can always issue and that shared memory has no
bank conflicts. Rates are those of compute capability 9.0 in NVIDIA's CUDA C++ Programming Guide ("Throughput of Native
Arithmetic Instructions"), and for matrix instructions those of an A100, which Hopper exceeds. Shared memory and L1 are one
array, so global loads count as its wavefronts too. The opcode UTCHMMA does not tell its shape: see `uncounted`.
"""

import re
import subprocess
import tempfile
from collections import Counter
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
WAVEFRONTS = {"": 1, "64": 2, "128": 4}
"""Wavefronts of a load or store of 4, 8 and 16 bytes per thread, by the opcode's last modifier."""


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

    def wide_bytes(self, num_warps: int) -> int:
        """Return the bytes that a block loads per iteration by loads of 16 bytes per thread."""
        return 16 * 32 * num_warps * sum(count for name, count in self.loads.items() if name.endswith(".128"))

    @property
    def bound(self) -> float:
        """Cycles of the slowest pipe."""
        return max(self.cycles.values())


def disassemble(cubin: bytes) -> list[tuple[int, str]]:
    """Return the (address, instruction) pairs of a cubin's only kernel, by the cuobjdump that Triton ships."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        process = subprocess.run(command, capture_output=True, text=True, check=True, env={"TMPDIR": folder})
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;", process.stdout, re.MULTILINE)
    return [(int(address, 16), text) for address, text in lines]


def main_loop(instructions: list[tuple[int, str]]) -> list[str]:
    """Return the instructions of the loop over whole tiles.

    Of the loops that load a page number, it is the shortest of those with the most matrix instructions: the loop over ragged
    tiles has as many and masks besides, and the loop over exact tokens reads no page table.

    Raises:
        ValueError: No loop has matrix instructions.
    """
    loops = []
    for address, text in instructions:
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if branch is not None and (start := int(branch[1], 16)) < address:
            body = [inner for inner_address, inner in instructions if start <= inner_address <= address]
            opcodes = [opcode(inner) for inner in body]
            matrix = sum(name.split(".")[0] in MATRIX for name in opcodes)
            loops.append((not {"LDG.E", "LDGSTS.E"} & set(opcodes), -matrix, len(body), body))
    _, negative_matrix, _, body = min(loops, default=(True, 0, 0, []))
    if not negative_matrix:
        raise ValueError("no loop with matrix instructions")
    return body


def opcode(text: str) -> str:
    """Return the opcode of an instruction without its predicate: `@P0 LDG.E.128 R4, ...` -> `LDG.E.128`."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def loop_cost(cubin: bytes, *, num_warps: int, tokens: int) -> LoopCost:
    """Return the cost of the main loop of a compiled kernel.

    Args:
        cubin: A cubin with one kernel.
        num_warps: Warps of a block.
        tokens: Tokens of one KV head that a block processes per iteration.
    """
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
    """Matrix products of 16 x 16 by 16 x 8 that an instruction performs per warp."""
    base, *modifiers = name.split(".")
    if base == "HGMMA":
        # Four warps multiply 64 x 16 by 16 x N; the modifier is 64xNx16.
        shape = next(modifier for modifier in modifiers if modifier.count("x") == 2)
        return int(shape.split("x")[1]) // 8
    return int(base == "HMMA")


def _wavefronts(name: str) -> int:
    """Wavefronts of shared memory and L1 that an instruction takes per warp."""
    base, *modifiers = name.split(".")
    last = modifiers[-1] if modifiers else ""
    if base in ("LDS", "STS", "LDG", "LDGSTS"):
        return WAVEFRONTS.get(last, 1)
    if base in ("LDSM", "STSM"):
        return int(last) if last.isdigit() else 1
    return 1 if base == "SHFL" else 0
