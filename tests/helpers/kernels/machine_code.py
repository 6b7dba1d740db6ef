"""A kernel's machine code and its memory accesses, found with the ptxas and cuobjdump that Triton ships."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton import knobs

from plugins.kv_attention.aot import NEWER_PTX

WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""Bytes per thread of a load, by the opcode's last modifier; all other loads have 4 bytes."""


def assembled(ptx: str) -> tuple[bytes, int]:
    """Compile PTX that has one entry with Triton's ptxas; return the cubin and the number of spilled bytes."""
    target = re.findall(r"^\.target (sm_(\d+)\w*)", ptx, re.MULTILINE)[0]
    assembler = knobs.nvidia.ptxas_blackwell if int(target[1]) >= NEWER_PTX else knobs.nvidia.ptxas
    assert Path(assembler.path).is_relative_to(Path(triton.__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [assembler.path, "-v", f"-arch={target[0]}", str(source), "-o", str(out)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        cubin = out.read_bytes()
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert spills, said
    return cubin, sum(map(int, spills))


def accesses(cubin: bytes) -> Counter[str]:
    """Count the loads, copies and stores of global or spilled memory in a cubin, by opcode: LDG.E.128, LDGSTS.E, ..."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Before copies, ptxas emits spacers: loads under a constantly false predicate (`@!PT`), which load nothing.
    lines = [line for line in text.splitlines() if "@!PT" not in line]
    return Counter(re.findall(r"\b((?:LDGSTS|LDG|STG|LDL|STL)[.\w]*)", "\n".join(lines)))


def streamed_bytes(found: Counter[str], num_warps: int) -> int:
    """Return the bytes that a block loads with asynchronous copies or 16-byte loads, if each instruction runs once."""
    streamed = {name: count for name, count in found.items() if name.startswith("LDGSTS") or name.endswith("LDG.E.128")}
    return 32 * num_warps * sum(count * WIDTHS.get(name.split(".")[-1], 4) for name, count in streamed.items())
