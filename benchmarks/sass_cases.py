"""The cases of sass_report.py, and a kernel's figures read from its machine code."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from plugins.kv_attention.aot import CompiledKernel, compile_context, compile_decode, compile_join
from plugins.kv_attention.kernels.context_variants import NARROW, context_splits, context_variant
from plugins.kv_attention.kernels.variants import Variant, decode_variant
from plugins.kv_attention.layout import HEAD_DIMS, KEY_DTYPES, CacheLayout, SideLayout
from plugins.kv_attention.sass import kernel_loop

KV_HEADS = 8
GROUPS = (1, 4, 8, 16)
QUERY_DTYPES = ("bfloat16", "float16", "float32")

CONTEXT_GROUP = 8
"""Query heads of a KV head that context_partial is compiled for."""
WORK = {"chunk": 8192, "drafts": NARROW}
"""Query rows of a KV head that context_partial is compiled for: 1,024 new tokens of 8 heads, and 2."""

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
    arguments: dict[str, Any] = {"group": group, "query_dtype": query_dtype, "scaling": layout.head_dim**-0.5, "sm": sm}
    kernel, variant = compile_decode(layout, **arguments), decode_variant(layout, **arguments)
    figures = _figures(policy, layout, query_dtype, kernel, variant)
    return figures | {"bytes_per_token_head": layout.token_bytes // layout.kv_heads}


def context_row(policy: str, layout: CacheLayout, group: int, work: str, query_dtype: str, sm: int) -> dict[str, Any]:
    """Compile a variant of context_partial and return its figures. work: of WORK, what its blocks of query rows are for."""
    arguments: dict[str, Any] = {"group": group, "rows": WORK[work], "query_dtype": query_dtype, "sm": sm}
    arguments["scaling"] = layout.head_dim**-0.5
    kernel, variant = compile_context(layout, **arguments), context_variant(layout, **arguments)
    figures = _figures(policy, layout, query_dtype, kernel, variant)
    return figures | {"work": work, "block_rows": variant.constants["N"]}


def join_row(policy: str, layout: CacheLayout, query_dtype: str, sm: int) -> dict[str, Any]:
    """Compile context_reduce for one split over the pages, and return its figures."""
    kernel = compile_join(layout, splits=context_splits(1), out_dtype=query_dtype, sm=sm)
    return {"policy": policy, "head_dim": layout.head_dim} | resources(kernel)


def resources(kernel: CompiledKernel) -> dict[str, Any]:
    """Return what a kernel takes of an SM."""
    return {
        "registers": kernel.registers,
        "spills": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "warps": kernel.num_warps,
    }


def _figures(policy: str, layout: CacheLayout, query_dtype: str, kernel: CompiledKernel, variant: Variant) -> dict[str, Any]:
    """The figures that both attention kernels have."""
    loop, tokens = kernel_loop(kernel.cubin), variant.constants["T"]
    codes = layout.key.code_bytes(layout.head_dim) + layout.value.code_bytes(layout.head_dim)
    return {
        "policy": policy,
        "head_dim": layout.head_dim,
        "group": variant.constants["G"],
        "query_dtype": query_dtype,
        "exact_tokens": layout.exact_tokens,
        **resources(kernel),
        "stages": variant.num_stages,
        "programs": variant.resident,
        "tile_tokens": tokens,
        "loop_instructions": loop.instructions,
        "loads": loop.loads,
        "narrow_loads": loop.streamed_bytes(kernel.num_warps) < tokens * codes,
    }
