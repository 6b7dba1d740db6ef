"""Constexprs, launch options and grids of every kernel, for launches and ahead-of-time compilation. Does not import torch."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from plugins.kv_attention.layout import CacheLayout, SideLayout

FP8_SM = 89
"""First compute capability, as major * 10 + minor, that converts float8 in hardware."""

DIRECT_FP8_SM = 90
"""First compute capability for which Triton converts float32 to float8 directly; below it, Triton rounds to float16 first."""

PDL_SM = 90
"""First compute capability with programmatic dependent launches: a kernel begins before its predecessor has ended."""

GROUP_LIMIT = 16
"""Largest number of query heads per KV head."""

APPEND_TILE = 512
"""Numbers that a warp of `append` quantizes at once: 16 per thread, so that a thread stores 16 bytes of 8-bit codes."""

PLAN_ROWS = 16
"""Programs of decode_partial that one program of plan_work plans. One pass over all sequences serves these 16 programs."""

PLAN_BLOCK = 256
"""Sequences that plan_work reads at once."""

WIDE_DTYPES = ("fp16", "bf16")
"""Dtypes of 16 bits."""

STAGES = 5
"""Software pipeline stages of the loop over tiles: load the page number, copy the tile to shared memory, use the tile.

With five or more, Triton holds two tiles, and copies one while it uses the other. The largest query,
16 heads of 256 channels in two terms, leaves neither registers nor shared memory for that, and has 1 stage.
"""

SM_SHARED = {80: 164 * 1024, 87: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024, 103: 228 * 1024}
"""Compute capability -> bytes of shared memory per SM; others have 100 KB. A program occupies 1 KB more than it requests."""

IN_FLIGHT_BYTES = 57 * 1024
"""Target bytes of tile loads in flight per SM, one tile per program. Fewer bytes leave bandwidth idle; more programs make more
parts to reduce (benchmarks/results/attention_variants_h200.json)."""

REDUCE_WARPS, REDUCE_PARTS = 1, 8
"""Warps of reduce_parts, and parts that it reads at once."""

MAX_REGISTERS = 255
"""Registers per thread of decode_partial and context_partial. Without this limit, ptxas uses only 168 for decode_partial and
spills a few bytes, for an occupancy that decoding does not need."""


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: its constexprs and launch options."""

    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    """Maximum registers per thread; None lets ptxas choose."""
    shared_bytes: int = 0
    """Maximum bytes of shared memory per program."""
    sm_shared: int = 100 * 1024
    """Bytes of shared memory per SM."""
    max_programs: int = 8
    """Maximum programs per SM."""
    overlaps: bool = False
    """Whether its programs may begin before the previous kernel has ended."""

    @property
    def resident(self) -> int:
        """Programs per SM, limited by `max_programs`, the SM's 65536 registers (256 per thread) and its shared memory."""
        return min(self.max_programs, 65536 // (32 * self.num_warps * 256), self.sm_shared // (self.shared_bytes + 1024))

    @property
    def options(self) -> dict[str, int]:
        """Triton's options for a launch and for ahead-of-time compilation. Constexprs are in `constants`."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        options |= {"launch_pdl": True} if self.overlaps else {}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}


Compute = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Setting:
    """Values that kernels are specialised for. Each kernel depends on some of them.

    Raises ValueError if the group or the scaling is out of range.
    """

    layout: CacheLayout
    dtype: Compute = "float32"
    """Type of queries, of new keys and values, and of results."""
    sm: int | None = None
    """Compute capability (90), or None for Triton's interpreter."""
    group: int = 1
    """Query heads per KV head, at most GROUP_LIMIT."""
    scaling: float = 1.0
    """Factor of the scores before the softmax."""
    rows: int = 1
    """Expected query rows per sequence and KV head: new tokens times `group`."""

    def __post_init__(self) -> None:
        if not 1 <= self.group <= GROUP_LIMIT:
            raise ValueError(f"query heads per KV head must be 1 to {GROUP_LIMIT}, got {self.group}")
        if not 0.0 < self.scaling < math.inf:
            raise ValueError(f"scaling must be positive and finite, got {self.scaling}")

    @property
    def q_heads(self) -> int:
        """Hq, query heads."""
        return self.layout.kv_heads * self.group

    @property
    def rounds_bfloat16(self) -> bool:
        """Whether a kernel rounds its bfloat16 results by integer arithmetic, because the interpreter truncates."""
        return self.sm is None and self.dtype == "bfloat16"

    @property
    def overlaps(self) -> bool:
        """Whether reduce_parts may begin before the parts are complete."""
        return self.sm is not None and self.sm >= PDL_SM


def decode_variant(setting: Setting) -> Variant:
    """Return the variant of decode_partial."""
    layout, group, sm = setting.layout, setting.group, setting.sm
    value, dim = layout.value, layout.head_dim
    width, groups = value.width(dim), value.groups(dim)
    # A value row is read in chunks. Each lies within one scale group of its stream, so that the scale can be folded into p. For
    # nvfp4, whose scales are multiplied into the codes, a chunk has as many channels as one word of four scales covers.
    chunk = min(width, 64 if value.layer_scale else dim // groups) if groups else width
    columns = max(8, 1 << (group - 1).bit_length())
    parts = _query_terms(layout.key, setting.dtype, sm)
    size = columns * dim * parts
    tile, warps = _tile_and_warps(layout, size, sm)
    stages = STAGES if size < 8192 else 1
    constants = {
        "H": layout.kv_heads,
        "G": group,
        "T": tile,
        "N": columns,
        "D": dim,
        "SCALING": setting.scaling,
        "PARTS": parts,
        "KEY": layout.key.dtype,
        "KEY_SCALE": _scale_kind(layout.key, "token"),
        "VALUE": value.dtype,
        "VALUE_SCALE": _scale_kind(value, "group"),
        "GROUPS": groups,
        "CHUNKS": width // chunk,
        "SINK": layout.sink_tokens,
        "RECENT": layout.recent_tokens,
        "PTX": sm is not None,
        "FP8": sm is not None and sm >= FP8_SM,
        "STAGES": stages,
        "PDL": setting.overlaps,
    }
    tile_bytes = tile * layout.token_bytes // layout.kv_heads
    # Two tiles, and a query or its sums while their layout changes.
    shared = 2 * tile_bytes + 4 * size + 64
    return Variant(
        constants,
        num_warps=warps,
        num_stages=stages,
        maxnreg=MAX_REGISTERS,
        shared_bytes=shared,
        sm_shared=SM_SHARED.get(sm or 0, Variant.sm_shared),
        max_programs=max(1, IN_FLIGHT_BYTES // tile_bytes),
    )


def _tile_and_warps(layout: CacheLayout, size: int, sm: int | None) -> tuple[int, int]:
    """Return the tokens of a tile and the warps of a program: one warp, which needs no barriers, if it has enough registers.

    `size`: numbers of a program's query, with all terms and padding.
    """
    dim, value = layout.head_dim, layout.value
    # If the hardware does not convert fp8_e4m3, the kernel decodes it with integer instructions, which need more registers.
    lacks_fp8 = sm is not None and sm < FP8_SM
    decodes_fp8 = lacks_fp8 and "fp8_e4m3" in (layout.key.dtype, value.dtype)
    # With exact tokens, one warp would then need more than 255 registers per thread for 8-bit values of the largest head.
    needs_two_warps = lacks_fp8 and dim == 256 and value.dtype in ("fp8_e4m3", "int8") and layout.exact_tokens > 0
    if any(side.dtype in WIDE_DTYPES for side in (layout.key, value)):
        halvings = 2
    else:
        # The largest tile needs the most registers. Only a small query over int4 values leaves enough for this tile, and only
        # if no fp8_e4m3 is decoded with integer instructions. The block scales of nvfp4 need registers themselves.
        halvings = 1 if not value.packed or value.layer_scale or size > 1024 or decodes_fp8 else 0
    tile = min(64, 8192 // dim >> halvings)
    if size <= 2048 and tile >= 16 and not needs_two_warps:
        return tile, 1
    if size < 8192:
        return max(16, tile), 2
    # The largest query, in two terms. Four warps load 16 bytes per thread: 32 tokens of 4-bit values, or 16 of wider ones.
    return 32 if value.packed else 16, 4


def plan_variant(setting: Setting) -> Variant:
    """Return the variant of plan_work, for any number of sequences and programs."""
    layout = setting.layout
    constants = {"SINK": layout.sink_tokens, "RECENT": layout.recent_tokens, "ROWS": PLAN_ROWS, "BLOCK": PLAN_BLOCK}
    return Variant(constants, num_warps=4, num_stages=1)


def plan_grid(programs: int) -> int:
    """Return the number of plan_work programs that plan `programs` programs of decode_partial per KV head."""
    return -(-programs // PLAN_ROWS)


def work_rows(programs: int, batch: Any, *, exact: bool) -> Any:
    """Return Y, the programs of a KV head: `programs` for the pages, and one per sequence for the exact tokens.

    `batch` may be a symbolic expression; then the result is one, too.
    """
    return batch + programs if exact else programs


def partial_dtype(query_dtype: str) -> str:
    """Return torch's name of the type of partial means: float16 for 16-bit queries, else float32."""
    return "float32" if query_dtype == "float32" else "float16"


def reduce_variant(setting: Setting) -> Variant:
    """Return the variant of reduce_parts."""
    layout = setting.layout
    constants = {
        "HQ": setting.q_heads,
        "D": layout.head_dim,
        "CHUNK": REDUCE_PARTS,
        "ROUND": setting.rounds_bfloat16,
        "PDL": setting.overlaps,
    }
    return Variant(constants, num_warps=REDUCE_WARPS, num_stages=1, overlaps=setting.overlaps)


def _scale_kind(side: SideLayout, dynamic: str) -> str:
    if side.layer_scale:
        return "block"
    kinds = {"none": "none", "per_tensor": "tensor", "per_head": "head", "per_token": dynamic, "per_group": dynamic}
    return kinds[side.granularity]


def _query_terms(key: SideLayout, query_dtype: str, sm: int | None) -> int:
    """Return the number of terms, of the type of decoded keys, that hold a query: 2 if it has more bits than one term."""
    if key.dtype == "bf16" and sm is None:
        return 1
    query_bits = {"bfloat16": 8, "float16": 11, "float32": 24}[query_dtype]
    return 1 if query_bits <= (8 if key.dtype == "bf16" else 11) else 2


def append_variant(setting: Setting) -> Variant:
    """Return the variant of append, for any number of layers and sequences and any type of new keys and values."""
    layout, sm = setting.layout, setting.sm
    key, value, dim = layout.key, layout.value, layout.head_dim
    static_scales = {name: shape[0] for name, (_, shape) in layout.static_scales().items()}
    constants = {
        "H": layout.kv_heads,
        "D": dim,
        "R": min(1 << (layout.kv_heads - 1).bit_length(), APPEND_TILE // dim),
        "KEY": key.dtype,
        "KEY_SCALES": static_scales.get("key_scale", 0),
        "VALUE": value.dtype,
        "VALUE_SCALES": static_scales.get("value_scale", 0),
        "GROUPS": max(1, value.groups(dim)),
        "SINK": layout.sink_tokens,
        "RECENT": layout.recent_tokens,
        "FP8": sm is not None and sm >= DIRECT_FP8_SM,
    }
    return Variant(constants, num_warps=1, num_stages=1)


WGMMA_SM = 90
"""First compute capability whose matrix instruction takes its second operand from shared memory."""

MIN_BLOCK_ROWS = 16
"""Query rows of the smallest block, for drafts of a few tokens."""

MAX_BLOCK_ROWS = 64
"""Query rows of the largest block from sm_90 on, where the matrix instruction takes queries from shared memory.

Below sm_90 it is half of this, because every warp holds the queries in registers.
"""

QUERY_NUMBERS = 8192
"""Maximum numbers in a block's queries, including all terms; below sm_90 the maximum is half of this.

These queries take 16 KB of shared memory in addition to two tiles. 8 warps hold as many sums in 32 registers per thread.
"""

NEW_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""torch's name of the type of new tokens -> the kernels' name."""


def context_variant(setting: Setting) -> Variant:
    """Return the variant of context_partial."""
    decode, layout, sm = decode_variant(setting), setting.layout, setting.sm
    dim, terms = layout.head_dim, decode.constants["PARTS"]
    # With float32, new tokens need more registers: they are as wide as the queries, and split into terms.
    numbers = dim * (4 if setting.dtype == "float32" else terms)
    widest = MAX_BLOCK_ROWS if sm is None or sm >= WGMMA_SM else MAX_BLOCK_ROWS // 2
    columns = (
        MIN_BLOCK_ROWS
        if setting.rows <= MIN_BLOCK_ROWS
        else max(MIN_BLOCK_ROWS, min(widest, QUERY_NUMBERS * widest // MAX_BLOCK_ROWS // numbers))
    )
    wide = any(side.dtype in WIDE_DTYPES for side in (layout.key, layout.value))
    # The largest tiles leave no shared memory for a second tile.
    stages = 1 if wide and dim == 256 else STAGES
    tile = 16 if wide or dim == 256 else 32
    constants = {name: value for name, value in decode.constants.items() if name != "PDL"} | {
        "T": tile,
        "U": 16 if dim == 256 or setting.dtype == "float32" else 32,
        "N": columns,
        "NEW": NEW_TYPES[setting.dtype],
        "STAGES": stages,
    }
    warps = 4 if columns == MIN_BLOCK_ROWS and numbers <= 256 else 8
    shared = 2 * tile * layout.token_bytes // layout.kv_heads + 2 * columns * dim * terms + 2 * tile * columns
    return replace(decode, constants=constants, num_warps=warps, num_stages=stages, shared_bytes=shared)


def context_blocks(tokens: int, variant: Variant) -> int:
    """Return the blocks of query rows of a sequence and KV head, for `tokens` new tokens."""
    return -(-tokens * int(variant.constants["G"]) // int(variant.constants["N"]))


def context_splits(splits: int) -> int:
    """Return S: `splits` for the pages, and one for the new and the exact tokens."""
    return splits + 1
