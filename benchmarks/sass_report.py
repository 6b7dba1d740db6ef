"""Counted facts of the attention kernels, read from machine code: registers, spills, shared memory, instructions and loads of
the main loop. Needs no GPU, and says nothing of speed.

    python -m benchmarks.sass_report --json benchmarks/results/sass.json      # some minutes
    python -m benchmarks.sass_report --all --sm 90                            # every variant, hours; prints defects only

Exit code 3 when a kernel spills, needs more shared memory than a plain launch has, or waits for loads of less than 16 bytes.
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
        log(f"{policy} D={row['head_dim']} G={group}: {row['registers']} registers, {row['loop_instructions']} instructions")
    context, joins = [], []
    for policy in options.policies.split(","):
        for dim in HEAD_DIMS:
            layout = CacheLayout(KV_HEADS, dim, *POLICIES[policy])
            context += [context_row(policy, layout, CONTEXT_GROUP, work, "bfloat16", options.sm) for work in WORK]
            joins.append(join_row(policy, layout, "bfloat16", options.sm))
        log(f"{policy}: context kernels take at most {max(row['registers'] for row in context)} registers so far")
    for shown in (table("decode_partial", kernels), table("context_partial", context)):
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
    """Log a kernel's defects. Returns whether it has any."""
    name = f"{row['policy']} D={row['head_dim']} G={row['group']} {row['query_dtype']} exact={row['exact_tokens']}"
    name += f" {row['work']}" if "work" in row else ""
    defects = {
        f"spills {row['spills']} bytes": row["spills"] > 0,
        f"needs {row['shared_bytes']} bytes of shared memory": row["shared_bytes"] > SHARED_LIMIT,
        f"waits for loads of less than 16 bytes: {row['loads']}": row["narrow_loads"],
    }
    for defect in (defect for defect, present in defects.items() if present):
        log(f"{name} {defect}")
    return any(defects.values())


def table(kernel: str, rows: list[dict[str, Any]]) -> Table:
    """Return the figures of one kernel's variants as a table."""
    out = Table(title=f"{kernel}: what its machine code takes")
    fields = ("policy", "head_dim", "group", "work", "registers", "spills", "shared_bytes", "warps", "programs", "tile_tokens")
    for name in (*fields, "loop_instructions"):
        out.add_column(name, justify="left" if name in ("policy", "work") else "right")
    for row in rows:
        out.add_row(*(str(row.get(name, "")) for name in (*fields, "loop_instructions")))
    return out


if __name__ == "__main__":
    sys.exit(main())
