"""Static cost of the attention kernels, read from SASS: registers, spills, cycles per (token, KV head), and the bandwidth that
latency and issue allow. Needs no GPU.

    python -m benchmarks.sass_report --json benchmarks/results/sass.json      # some minutes
    python -m benchmarks.sass_report --all --sm 90                            # every variant, hours; prints defects only

Cycles are those of the slowest pipe of an SM in the main loop (plugins/kv_attention/sass.py says what that leaves out). The
budget is the number of cycles in which the bytes of that token arrive; a kernel above its budget is slower than its memory.
Ceilings are a model's (plugins/kv_attention/scoreboard.py): the bandwidth of an H200 whose every SM runs as many programs as
it holds, if a load takes so many cycles and memory itself sets no limit. `python -m benchmarks.sass_calibration` holds the
model to published speeds.

Of several new tokens, context_partial shares a tile's cost among the query rows of a block, so that a chunk is bound by
instructions and not by memory: its cycles are those of a (token, KV head, block), and its ceiling is the TFLOP/s of the slowest
pipe. That counts tensor cores at the rate of an A100, and leaves out waits, because the model of latency knows none for wgmma.
Blocks for a few drafted tokens are bound by memory, and have ceilings of bandwidth too, with the same waits left out. Exit code
3 when a kernel spills, needs more shared memory than a plain launch has, or waits for loads of less than 16 bytes.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.recording import log, results_record, write_json
from benchmarks.sass_cases import (
    CONTEXT_GROUP,
    KV_HEADS,
    LATENCIES,
    POLICIES,
    WORK,
    all_cases,
    context_row,
    join_row,
    kernel_row,
    policy_cases,
)
from plugins.kv_attention.aot import SHARED_LIMIT
from plugins.kv_attention.layout import HEAD_DIMS, CacheLayout


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report with command-line arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.sass_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--sm", type=int, default=90, help="compute capability: 80, 89, 90 (default) or 100")
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--all", action="store_true", help="compile every variant and print only defects")
    parser.add_argument("--every", type=int, default=1, help="with --all, compile every N-th variant")
    parser.add_argument("--first", type=int, default=0, help="with --every, number of the first variant, to share the work")
    options = parser.parse_args(argv)
    if options.all:
        return check(itertools.islice(all_cases(), options.first, None, options.every), options.sm)
    kernels = []
    for policy, layout, group in policy_cases(options.policies.split(",")):
        kernels.append(row := kernel_row(policy, layout, group, "bfloat16", options.sm))
        ceilings = ", ".join(f"{ceiling:.2f}" for ceiling in row["ceiling_tb_per_s"].values())
        log(f"{policy} D={row['head_dim']} G={group}: {row['cycles_per_token_head']:.2f} cycles, at most {ceilings} TB/s")
    context, joins = [], []
    for policy in options.policies.split(","):
        for dim in HEAD_DIMS:
            layout = CacheLayout(KV_HEADS, dim, *POLICIES[policy])
            context += [context_row(policy, layout, CONTEXT_GROUP, work, "bfloat16", options.sm) for work in WORK]
            joins.append(join_row(policy, layout, "bfloat16", options.sm))
        log(f"{policy}: context kernels take at most {max(row['registers'] for row in context)} registers so far")
    for shown in (table(kernels), context_table(context)):
        Console(width=150).print(shown)
    figures = {"kernels": kernels, "context": context, "context_reduce": joins}
    content = results_record([], libraries=("triton", "torch"), target=f"sm_{options.sm}", **figures)
    del content["results"]
    write_json(options.json, content)
    wrong = sum([report_defects(row) for row in [*kernels, *context]]) + sum(row["spills"] > 0 for row in joins)
    return 3 if wrong else 0


def check(cases: Iterable[tuple[str, CacheLayout, int, str]], sm: int) -> int:
    """Compile variants and report those with defects. Returns the exit code."""
    count = failures = 0
    for policy, layout, group, query_dtype in cases:
        failures += report_defects(kernel_row(policy, layout, group, query_dtype, sm))
        count += 1
        if count % 100 == 0:
            log(f"sm_{sm}: {count} variants so far, {failures} wrong")
    log(f"sm_{sm}: {count} variants, {failures} spill, are too large or load too little at once")
    return 3 if failures else 0


def report_defects(row: dict[str, Any]) -> bool:
    """Log a kernel's defects, and instructions that its cycles leave out. Returns whether it has defects."""
    name = f"{row['policy']} D={row['head_dim']} G={row['group']} {row['query_dtype']} exact={row['exact_tokens']}"
    name += f" {row['work']}" if "work" in row else ""
    if row["uncounted"]:
        log(f"{name}: {row['uncounted']} matrix instructions are not counted in its cycles")
    defects = {
        f"spills {row['spills']} bytes": row["spills"] > 0,
        f"needs {row['shared_bytes']} bytes of shared memory": row["shared_bytes"] > SHARED_LIMIT,
        f"waits for loads of less than 16 bytes: {row['loads']}": row["narrow_loads"],
    }
    for defect in (defect for defect, present in defects.items() if present):
        log(f"{name} {defect}")
    return any(defects.values())


def table(kernels: list[dict[str, Any]]) -> Table:
    """Return the report as a table."""
    out = Table(title="decode_partial: cycles of an SM per (token, KV head), from SASS")
    for name in ("policy", "D", "G", "registers", "spills", "shared", "programs", "issue", "alu", "tensor", "shared pipe"):
        out.add_column(name, justify="left" if name == "policy" else "right")
    for name in ("bound", "budget", *(f"TB/s at {latency}" for latency in LATENCIES)):
        out.add_column(name, justify="right", style="bold")
    for row in kernels:
        pipes = row["cycles_by_pipe"]
        out.add_row(
            row["policy"],
            *(str(row[name]) for name in ("head_dim", "group", "registers", "spills", "shared_bytes", "programs")),
            *(f"{pipes[name]:.2f}" for name in ("issue", "alu", "tensor", "shared")),
            f"{row['cycles_per_token_head']:.2f}",
            f"{row['budget_cycles']:.1f}",
            *(f"{ceiling:.1f}" for ceiling in row["ceiling_tb_per_s"].values()),
        )
    return out


def context_table(kernels: list[dict[str, Any]]) -> Table:
    """Return the report of the kernels of several new tokens as a table."""
    out = Table(title="context_partial: cycles of an SM per (token, KV head, block of query rows), from SASS")
    names = ("policy", "D", "work", "rows", "warps", "registers", "spills", "shared", "programs")
    for name in (*names, "issue", "alu", "tensor", "shared pipe", "bound", "TFLOP/s", f"TB/s at {LATENCIES[1]}"):
        out.add_column(name, justify="left" if name in ("policy", "work") else "right")
    fields = ("policy", "head_dim", "work", "block_rows", "warps", "registers", "spills", "shared_bytes", "programs")
    for row in kernels:
        out.add_row(
            *(str(row[name]) for name in fields),
            *(f"{row['cycles_by_pipe'][name]:.1f}" for name in ("issue", "alu", "tensor", "shared")),
            f"{row['cycles_per_token_head_block']:.1f}",
            str(row.get("pipes_tflop_per_s", "")),
            str(row.get("ceiling_tb_per_s", {}).get(str(LATENCIES[1]), "")),
        )
    return out


if __name__ == "__main__":
    sys.exit(main())
