"""Registers, spills and shared memory of the kernels by version of Triton and compute capability. Needs no GPU.

    python -m benchmarks.compile_matrix --json benchmarks/results/compile_matrix.json        # the Triton that is installed
    pip install --no-deps --target FOLDER triton==3.7.1                                      # and another one beside it:
    PYTHONPATH=FOLDER python -m benchmarks.compile_matrix --json benchmarks/results/compile_matrix.json

Rows of other versions of Triton that the file has stay in it. Exit code 3 when a kernel spills or needs more shared memory
than a plain launch has.
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
from benchmarks.sass_cases import KV_HEADS, POLICIES, WORK, context_row, join_row, kernel_row, resources
from plugins.kv_attention.aot import SHARED_LIMIT, assembler, compile_append, compile_plan, compile_reduce
from plugins.kv_attention.layout import CacheLayout

TARGETS = (80, 89, 90, 100)
HEAD_DIM, GROUP, QUERY_DTYPE = 128, 8, "bfloat16"
RESOURCES = ("registers", "spills", "shared_bytes", "warps")
DECODE_FIELDS = (*RESOURCES, "tile_tokens", "programs")
CONTEXT_FIELDS = (*RESOURCES, "tile_tokens", "programs", "block_rows")


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the matrix with command-line arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.compile_matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file, beside those of other versions of Triton")
    parser.add_argument("--sm", type=lambda text: [int(part) for part in text.split(",")], default=TARGETS, help="80,90")
    options = parser.parse_args(argv)
    rows = [row for sm in options.sm for row in target_rows(sm)]
    Console(width=150).print(table(rows))
    write_json(options.json, content(rows, options.json))
    wrong = [row for row in rows if row["spills"] or row["shared_bytes"] > SHARED_LIMIT]
    for row in wrong:
        log(f"{row['kernel']} {row['policy']} sm_{row['sm']}: {row['spills']} bytes spill, {row['shared_bytes']} are shared")
    return 3 if wrong else 0


def target_rows(sm: int) -> list[dict[str, Any]]:
    """Compile every kernel for one compute capability. Returns a row each."""
    rows = []
    for policy, sides in POLICIES.items():
        layout = CacheLayout(KV_HEADS, HEAD_DIM, *sides)
        figures = kernel_row(policy, layout, GROUP, QUERY_DTYPE, sm)
        others = {
            "plan": compile_plan(sink_tokens=0, recent_tokens=0, sm=sm),
            "reduce": compile_reduce(q_heads=KV_HEADS * GROUP, head_dim=HEAD_DIM, out_dtype=QUERY_DTYPE, sm=sm),
            "append": compile_append(layout, new_dtype=QUERY_DTYPE, sm=sm),
        }
        found = {"decode": {name: figures[name] for name in DECODE_FIELDS}}
        for work in WORK:
            context = context_row(policy, layout, GROUP, work, QUERY_DTYPE, sm)
            found[f"context {work}"] = {name: context[name] for name in CONTEXT_FIELDS}
        joined = join_row(policy, layout, QUERY_DTYPE, sm)
        found["context_reduce"] = {name: joined[name] for name in RESOURCES}
        found |= {name: resources(kernel) for name, kernel in others.items()}
        tool = assembler(sm)
        for kernel, numbers in found.items():
            rows.append(
                {"triton": triton.__version__, "ptxas": tool.version, "sm": sm, "kernel": kernel, "policy": policy, **numbers}
            )
        log(f"sm_{sm} {policy}: {figures['registers']} registers, {figures['spills']} bytes spill")
    return rows


def content(rows: list[dict[str, Any]], file: Path | None) -> dict[str, Any]:
    """Return the content of the results file: these rows, and of an existing file those of other versions of Triton."""
    kept = json.loads(file.read_text())["results"] if file is not None and file.is_file() else []
    others = [row for row in kept if row["triton"] != triton.__version__]
    return results_record(
        sorted([*others, *rows], key=lambda row: [int(part) for part in row["triton"].split(".")]),
        libraries=("torch",),
        shape={"kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "group": GROUP, "query_dtype": QUERY_DTYPE},
    )


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    out = Table(title=f"kernels at D {HEAD_DIM}, G {GROUP}, compiled by Triton {triton.__version__}")
    names = ("sm", "kernel", "policy", "ptxas", "warps", "registers", "spills", "shared_bytes")
    for name in names:
        out.add_column(name, justify="left" if name in ("kernel", "policy") else "right")
    for row in rows:
        out.add_row(*(str(row.get(name, "")) for name in names))
    return out


if __name__ == "__main__":
    sys.exit(main())
