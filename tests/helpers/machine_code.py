"""Accesses to memory in a kernel's machine code, by the cuobjdump that Triton ships."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from triton import knobs

WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""Bytes per thread of a load, by the opcode's last modifier; others have 4."""


def accesses(cubin: bytes) -> Counter[str]:
    """Return how often each load, copy and store of global or spilled memory stands in a cubin: LDG.E.128, LDGSTS.E, ..."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # ptxas puts loads under a constantly false predicate (`@!PT`) before copies as spacers, which load nothing.
    lines = [line for line in text.splitlines() if "@!PT" not in line]
    return Counter(re.findall(r"\b((?:LDGSTS|LDG|STG|LDL|STL)[.\w]*)", "\n".join(lines)))


def streamed_bytes(found: Counter[str], num_warps: int) -> int:
    """Return the bytes that a block loads by asynchronous copies, or by 16 bytes per thread, if each is executed once."""
    streamed = {name: count for name, count in found.items() if name.startswith("LDGSTS") or name.endswith("LDG.E.128")}
    return 32 * num_warps * sum(count * WIDTHS.get(name.split(".")[-1], 4) for name, count in streamed.items())
