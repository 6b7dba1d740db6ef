"""Static cost of the decode kernels: registers, spills, and cycles per (token, KV head) read from SASS. Needs no GPU.

    python -m benchmarks.sass_report --json benchmarks/results/sass.json      # a minute or two
    python -m benchmarks.sass_report --all --sm 90                            # every variant, hours; prints defects only

Cycles are those of the slowest pipe of an SM in the main loop (plugins/kv_attention/sass.py says what that leaves out). The
budget is the number of cycles in which the bytes of that token arrive; a kernel above its budget is slower than its memory.
Exit code 3 when a kernel spills, needs more shared memory than a plain launch has, or loads its cache in less than 16 bytes.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.recording import log, results_record, write_json
from plugins.kv_attention.aot import SHARED_LIMIT, compile_decode
from plugins.kv_attention.kernels.variants import decode_variant
from plugins.kv_attention.layout import HEAD_DIMS, KEY_DTYPES, LIMITS, CacheLayout, SideLayout
from plugins.kv_attention.sass import loop_cost

KV_HEADS = 8
GROUPS = (1, 4, 8, 16)
QUERY_DTYPES = ("bfloat16", "float16", "float32")

SM_BYTES_PER_S = 0.85 * 4.3e12 / 132
"""Bandwidth of one of an H200's 132 SMs: 85 % of the 4.3 TB/s that a copy reaches."""
SM_HZ = 1.76e9

FP8 = SideLayout("fp8_e4m3", "per_tensor")
INT8 = SideLayout("int8", "per_token")
INT4 = SideLayout("int4", "per_group", 64)
BF16 = SideLayout("bf16")
POLICIES = {
    "fp8k_int4v": (FP8, INT4),
    "int8k_int4v": (INT8, INT4),
    "fp8": (FP8, FP8),
    "int8": (INT8, INT8),
    "bf16": (BF16, BF16),
}


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
        log(f"{policy} D={row['head_dim']} G={group}: {row['cycles_per_token_head']:.2f} cycles")
    Console(width=128).print(table(kernels))
    content = results_record([], libraries=("triton", "torch"), target=f"sm_{options.sm}", kernels=kernels)
    del content["results"]
    write_json(options.json, content)
    return 3 if sum([report_defects(row) for row in kernels]) else 0


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
    if row["uncounted"]:
        log(f"{name}: {row['uncounted']} matrix instructions are not counted in its cycles")
    defects = {
        f"spills {row['spills']} bytes": row["spills"] > 0,
        f"needs {row['shared_bytes']} bytes of shared memory": row["shared_bytes"] > SHARED_LIMIT,
        f"loads less than 16 bytes at once: {row['loads']}": row["loads_narrow_stream"],
    }
    for defect in (defect for defect, present in defects.items() if present):
        log(f"{name} {defect}")
    return any(defects.values())


def policy_cases(names: Sequence[str]) -> Iterator[tuple[str, CacheLayout, int]]:
    """Yield the cases of the given policies: every group at head_dim 128, and a group of 8 at the others."""
    for name in names:
        if name not in POLICIES:
            raise SystemExit(f"--policies must be of {', '.join(POLICIES)}, got {name}")
        for dim in HEAD_DIMS:
            for group in GROUPS if dim == 128 else (8,):
                yield name, CacheLayout(KV_HEADS, dim, *POLICIES[name]), group


def all_cases() -> Iterator[tuple[str, CacheLayout, int, str]]:
    """Yield every pair of formats, head_dim, type of queries and width of the matrix instruction's N, with and without exact
    tokens. Scales per tensor are left out, since they compile as scales per head do.
    """
    sides = {dtype: [SideLayout(dtype)] for dtype in ("bf16", "fp16")}
    sides |= {dtype: [SideLayout(dtype, "per_head"), SideLayout(dtype, "per_token")] for dtype in LIMITS if dtype != "int4"}
    sides["int4"] = [SideLayout("int4", "per_token"), *(SideLayout("int4", "per_group", size) for size in (32, 64, 128))]
    for dim in HEAD_DIMS:
        for key in (side for dtype in KEY_DTYPES for side in sides[dtype]):
            for value in (side for several in sides.values() for side in several):
                if (value.group_size or 0) > dim:
                    continue
                for group, query_dtype, exact in itertools.product((1, 8, 16), QUERY_DTYPES, ((0, 0), (4, 60))):
                    yield (
                        f"{describe(key)}/{describe(value)}",
                        CacheLayout(KV_HEADS, dim, key, value, *exact),
                        group,
                        query_dtype,
                    )


def describe(side: SideLayout) -> str:
    """Return the name of a side's format: fp8_e4m3-per_tensor."""
    return "-".join(str(part) for part in (side.dtype, side.granularity, side.group_size) if part not in (None, "none"))


def kernel_row(policy: str, layout: CacheLayout, group: int, query_dtype: str, sm: int) -> dict[str, Any]:
    """Compile a variant of decode_partial and return its figures."""
    scaling = layout.head_dim**-0.5
    kernel = compile_decode(layout, group=group, query_dtype=query_dtype, scaling=scaling, sm=sm)
    variant = decode_variant(layout, group=group, query_dtype=query_dtype, scaling=scaling, sm=sm)
    cost = loop_cost(kernel.cubin, num_warps=kernel.num_warps, tokens=variant.constants["T"])
    wide = sum(count for name, count in cost.loads.items() if name.endswith(".128"))
    bytes_per_head = layout.token_bytes // layout.kv_heads
    streams = variant.constants["T"] * (layout.head_dim * (_bits(layout.key) + _bits(layout.value)) // 8)
    return {
        "policy": policy,
        "head_dim": layout.head_dim,
        "group": group,
        "query_dtype": query_dtype,
        "exact_tokens": layout.exact_tokens,
        "registers": kernel.registers,
        "spills": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "warps": kernel.num_warps,
        "tile_tokens": variant.constants["T"],
        "loop_instructions": cost.instructions,
        "loads_16_byte": wide,
        "loads_narrow_stream": cost.wide_bytes(kernel.num_warps) < streams,
        "loads": cost.loads,
        "uncounted": cost.uncounted,
        "cycles_per_token_head": round(cost.bound, 3),
        "cycles_by_pipe": {pipe: round(cycles, 3) for pipe, cycles in cost.cycles.items()},
        "bytes_per_token_head": bytes_per_head,
        "budget_cycles": round(bytes_per_head / SM_BYTES_PER_S * SM_HZ, 2),
    }


def _bits(side: SideLayout) -> int:
    return 4 if side.dtype == "int4" else 16 if side.exact else 8


def table(kernels: list[dict[str, Any]]) -> Table:
    """Return the report as a table."""
    out = Table(title="decode_partial: cycles of an SM per (token, KV head), from SASS")
    for name in ("policy", "D", "G", "registers", "spills", "shared", "16-byte loads", "issue", "alu", "tensor", "shared pipe"):
        out.add_column(name, justify="left" if name == "policy" else "right")
    for name in ("bound", "budget"):
        out.add_column(name, justify="right", style="bold")
    for row in kernels:
        pipes = row["cycles_by_pipe"]
        out.add_row(
            row["policy"],
            *(str(row[name]) for name in ("head_dim", "group", "registers", "spills", "shared_bytes", "loads_16_byte")),
            *(f"{pipes[name]:.2f}" for name in ("issue", "alu", "tensor", "shared")),
            f"{row['cycles_per_token_head']:.2f}",
            f"{row['budget_cycles']:.1f}",
        )
    return out


if __name__ == "__main__":
    sys.exit(main())
