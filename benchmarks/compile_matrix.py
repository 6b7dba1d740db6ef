"""Counted facts of the kernels' machine code by version of Triton and compute capability: registers, spills, shared memory, and
the instructions and loads of an attention kernel's main loop. Needs no GPU, and says nothing of speed.

    python -m benchmarks.compile_matrix --json benchmarks/results/compile_matrix.json        # the Triton that is installed
    pip install --no-deps --target FOLDER triton==3.7.1                                      # and another one beside it:
    PYTHONPATH=FOLDER python -m benchmarks.compile_matrix --json benchmarks/results/compile_matrix.json

Rows of other versions of Triton that the file has stay in it. Exit code 3 when a kernel spills, needs more shared memory than a
plain launch has, or waits for loads of less than 16 bytes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.table import Table

from benchmarks.recording import log, results_record, write_json
from plugins.kv_attention.aot import KERNELS, SHARED_LIMIT, assembler, compile_operation
from plugins.kv_attention.kernels.context_variants import NARROW
from plugins.kv_attention.kernels.variants import Setting
from plugins.kv_attention.layout import CacheLayout, SideLayout
from plugins.kv_attention.sass import kernel_loop
from plugins.kv_attention.tensorrt_nodes import Operation

TARGETS = (80, 89, 90, 100)
KV_HEADS, HEAD_DIM, GROUP, DTYPE = 8, 128, 8, "bfloat16"

FP8 = SideLayout("fp8_e4m3", "per_tensor")
INT8 = SideLayout("int8", "per_token")
INT4 = SideLayout("int4", "per_group", 64)
BF16 = SideLayout("bf16")
POLICIES = {
    "fp8k_int4v": (FP8, INT4),
    "fp8k_nvfp4v": (FP8, SideLayout("nvfp4", "per_group", 16)),
    "int8k_int4v": (INT8, INT4),
    "fp8": (FP8, FP8),
    "int8": (INT8, INT8),
    "bf16": (BF16, BF16),
}

COMPILED: dict[str, tuple[Operation, int]] = {
    "decode": ("decode_partial", 1),
    "plan": ("plan_work", 1),
    "reduce": ("decode_reduce", 1),
    "append": ("append", 1),
    "context chunk": ("context_partial", 1024 * GROUP),
    "context drafts": ("context_partial", NARROW),
    "context_reduce": ("context_reduce", 1),
}
"""Operation of each kernel, and query rows that a sequence is likely to have: of 1,024 new tokens, and of 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the matrix with command-line arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.compile_matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file, beside those of other versions of Triton")
    parser.add_argument("--sm", type=lambda text: [int(part) for part in text.split(",")], default=TARGETS, help="80,90")
    options = parser.parse_args(argv)
    rows = []
    for sm in options.sm:
        for policy in POLICIES:
            rows += [row(kernel, policy, sm) for kernel in COMPILED]
            log(f"sm_{sm} {policy}: at most {max(one['registers'] for one in rows)} registers so far")
    Console(width=150).print(table(rows))
    write_json(options.json, content(rows, options.json))
    wrong = [one for one in rows if one["spills"] or one["shared_bytes"] > SHARED_LIMIT or one.get("narrow_loads")]
    for one in wrong:
        log(f"defect: {one}")
    return 3 if wrong else 0


def row(kernel: str, policy: str, sm: int) -> dict[str, Any]:
    """Compile a kernel for a policy's layout and a compute capability, and return its figures."""
    operation, rows = COMPILED[kernel]
    layout = CacheLayout(KV_HEADS, HEAD_DIM, *POLICIES[policy])
    setting = Setting(layout, DTYPE, sm, GROUP, HEAD_DIM**-0.5, rows)
    compiled = compile_operation(operation, setting)
    figures = {
        "triton": triton.__version__,
        "ptxas": assembler(sm).version,
        "sm": sm,
        "kernel": kernel,
        "policy": policy,
        "registers": compiled.registers,
        "spills": compiled.spill_bytes,
        "shared_bytes": compiled.shared_bytes,
        "warps": compiled.num_warps,
    }
    if not operation.endswith("_partial"):
        return figures
    variant, loop = KERNELS[operation][1](setting), kernel_loop(compiled.cubin)
    tokens = variant.constants["T"]
    codes = tokens * sum(side.code_bytes(HEAD_DIM) for side in POLICIES[policy])
    return figures | {
        "block_rows": variant.constants["N"],
        "tile_tokens": tokens,
        "programs": variant.resident,
        "loop_instructions": loop.instructions,
        "loads": loop.loads,
        "narrow_loads": loop.streamed_bytes(compiled.num_warps) < codes,
    }


def content(rows: list[dict[str, Any]], file: Path | None) -> dict[str, Any]:
    """Return the content of the results file: these rows, and of an existing file those of other versions of Triton."""
    kept = json.loads(file.read_text())["results"] if file is not None and file.is_file() else []
    others = [row for row in kept if row["triton"] != triton.__version__]
    return results_record(
        sorted([*others, *rows], key=lambda row: [int(part) for part in row["triton"].split(".")]),
        libraries=("torch",),
        shape={"kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "group": GROUP, "query_dtype": DTYPE},
    )


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    out = Table(title=f"kernels at D {HEAD_DIM}, G {GROUP}, compiled by Triton {triton.__version__}")
    names = ("sm", "kernel", "policy", "warps", "registers", "spills", "shared_bytes", "tile_tokens", "loop_instructions")
    for name in names:
        out.add_column(name, justify="left" if name in ("kernel", "policy") else "right")
    for row in rows:
        out.add_row(*(str(row.get(name, "")) for name in names))
    return out


if __name__ == "__main__":
    sys.exit(main())
