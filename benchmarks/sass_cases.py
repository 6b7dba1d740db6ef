"""The cases of sass_report.py, and a kernel's figures read from its machine code."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from plugins.kv_attention.aot import compile_decode
from plugins.kv_attention.kernels.variants import decode_variant
from plugins.kv_attention.layout import HEAD_DIMS, KEY_DTYPES, CacheLayout, SideLayout
from plugins.kv_attention.sass import disassemble, loop_cost, main_loop
from plugins.kv_attention.scoreboard import cycles_per_iteration

KV_HEADS = 8
GROUPS = (1, 4, 8, 16)
QUERY_DTYPES = ("bfloat16", "float16", "float32")

SMS = 132
SM_HZ = 1.76e9
SM_BYTES_PER_S = 0.85 * 4.3e12 / SMS
"""Bandwidth of one of an H200's SMs: 85 % of the 4.3 TB/s that a copy reaches."""

LATENCIES = (1000, 1300, 1600, 2300)
"""Cycles that a load from DRAM is assumed to take under load. The last is what NVIDIA's figure for Hopper means by Little's
law: more than 32 KiB must be under way in each SM to saturate 3.35 TB/s (GTC 2025, S72683)."""

FP8 = SideLayout("fp8_e4m3", "per_tensor")
INT8 = SideLayout("int8", "per_token")
INT4 = SideLayout("int4", "per_group", 64)
NVFP4 = SideLayout("nvfp4", "per_group", 16)
BF16 = SideLayout("bf16")
POLICIES = {
    "fp8k_int4v": (FP8, INT4),
    "fp8k_nvfp4v": (FP8, NVFP4),
    "int8k_int4v": (INT8, INT4),
    "fp8": (FP8, FP8),
    "int8": (INT8, INT8),
    "bf16": (BF16, BF16),
}


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
    sides |= {dtype: [SideLayout(dtype, "per_head"), SideLayout(dtype, "per_token")] for dtype in ("fp8_e4m3", "int8")}
    sides["int4"] = [SideLayout("int4", "per_token"), *(SideLayout("int4", "per_group", size) for size in (32, 64, 128))]
    sides["nvfp4"] = [NVFP4]
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
    tokens, warps = variant.constants["T"], kernel.num_warps
    body = main_loop(disassemble(kernel.cubin))
    cost = loop_cost(body, num_warps=warps, tokens=tokens)
    token_bytes = layout.token_bytes // layout.kv_heads
    codes = layout.key.code_bytes(layout.head_dim) + layout.value.code_bytes(layout.head_dim)
    return {
        "policy": policy,
        "head_dim": layout.head_dim,
        "group": group,
        "query_dtype": query_dtype,
        "exact_tokens": layout.exact_tokens,
        "registers": kernel.registers,
        "spills": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "warps": warps,
        "stages": variant.num_stages,
        "programs": variant.resident,
        "tile_tokens": tokens,
        "loop_instructions": cost.instructions,
        "loads": cost.loads,
        "narrow_loads": cost.streamed_bytes(warps) < tokens * codes,
        "uncounted": cost.uncounted,
        "cycles_per_token_head": round(cost.bound, 3),
        "cycles_by_pipe": {pipe: round(cycles, 3) for pipe, cycles in cost.cycles.items()},
        "bytes_per_token_head": token_bytes,
        "budget_cycles": round(token_bytes / SM_BYTES_PER_S * SM_HZ, 2),
        "ceiling_tb_per_s": {
            str(latency): round(
                variant.resident
                * tokens
                * token_bytes
                * SM_HZ
                * SMS
                / 1e12
                / cycles_per_iteration(body, programs=variant.resident, num_warps=warps, latency=latency),
                2,
            )
            for latency in LATENCIES
        },
    }
