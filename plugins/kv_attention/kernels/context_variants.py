"""Constexprs, launch options and grid of context_partial, for launches and ahead-of-time compilation alike. No torch."""

from dataclasses import replace

from plugins.kv_attention.kernels.variants import STAGES, WIDE, Setting, Variant, decode_variant

WGMMA_SM = 90
"""First compute capability whose matrix instruction takes its second operand from shared memory."""

NARROW = 16
"""Query rows of the smallest block: drafts of a few tokens."""

WIDEST = 64
"""Query rows of the largest block where the matrix instruction takes queries from shared memory; half of it below sm_90, where
each warp holds them in registers."""

QUERY_NUMBERS = 8192
"""Numbers of a block of 64 rows' queries at most, all terms of them: 16 KB of shared memory beside two tiles. The sums are as
many, which 8 warps hold in 32 registers a thread."""

NEW = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""The kernels' names of the types of new tokens, by torch's."""


def context_variant(setting: Setting) -> Variant:
    """Return the variant of context_partial."""
    decode, layout, sm = decode_variant(setting), setting.layout, setting.sm
    dim, terms = layout.head_dim, decode.constants["PARTS"]
    # Sinks, recent and new tokens take more registers of float32: they are as wide as the queries, and in terms as well.
    numbers = dim * (4 if setting.dtype == "float32" else terms)
    widest = WIDEST if sm is None or sm >= WGMMA_SM else WIDEST // 2
    columns = NARROW if setting.rows <= NARROW else max(NARROW, min(widest, QUERY_NUMBERS * widest // WIDEST // numbers))
    wide = any(side.dtype in WIDE for side in (layout.key, layout.value))
    # The largest tiles leave no shared memory for two of them.
    stages = 1 if wide and dim == 256 else STAGES
    tile = 16 if wide or dim == 256 else 32
    constants = {name: value for name, value in decode.constants.items() if name != "PDL"} | {
        "T": tile,
        "U": 16 if dim == 256 or setting.dtype == "float32" else 32,
        "N": columns,
        "NEW": NEW[setting.dtype],
        "STAGES": stages,
    }
    warps = 4 if columns == NARROW and numbers <= 256 else 8
    shared = 2 * tile * layout.token_bytes // layout.kv_heads + 2 * columns * dim * terms + 2 * tile * columns
    return replace(decode, constants=constants, num_warps=warps, num_stages=stages, shared_bytes=shared)


def context_blocks(tokens: int, sequences: int, variant: Variant, *, ragged: bool) -> int:
    """Return the blocks of query rows of a KV head, those without rows included."""
    group, columns = int(variant.constants["G"]), int(variant.constants["N"])
    if ragged:
        return tokens * group // columns + sequences
    return sequences * -(-(tokens // sequences) * group // columns)


def context_splits(splits: int) -> int:
    """Return S: `splits` over the pages, and one over the new and the exact tokens."""
    return splits + 1


def join_variant(setting: Setting) -> Variant:
    """Return the variant of context_reduce."""
    block = 1 << (context_splits(setting.splits) - 1).bit_length()
    constants = {"D": setting.layout.head_dim, "BLOCK": block, "ROUND": setting.rounds_bfloat16}
    return Variant(constants, num_warps=1, num_stages=1)
