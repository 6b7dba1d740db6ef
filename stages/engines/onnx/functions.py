"""Bodies of the `kv` functions for any KV policy: paged attention and the quantization of new tokens.

Shapes: B sequences, S new tokens per sequence, Hq query heads on H KV heads (G = Hq / H), R = G * S query rows of a KV head, D
head_dim, P pages of a sequence, T = 64 * P pool positions, E = sink_tokens + recent_tokens exact slots, M exact buffers.
With a window: P pages before the window and Y pages in the window. A side may have second copies of the Y pages.

A query attends to the new tokens exactly (causal), to the sinks and the last `recent_tokens` before the chunk in float16
buffers, and to all other tokens in the quantized pool. The pool contains every token, so positions that are read from the
buffers are masked in the pool. Sink i is in exact slot i. Slot sink_tokens + position % recent_tokens holds the newest token
with this residue.

A sliding-window layer of the model attends only to its latest tokens (KVShape.windows; not the policy's window of finer
formats). Earlier tokens are masked everywhere. If pages were evicted, all positions count from the first kept page. Distances
between tokens are then still correct.

If the decoder's activations are bfloat16, the functions cast them to float32 and compute in float32 (`cache_arithmetic`).
"""

from dataclasses import dataclass
from itertools import pairwise

import onnx

from stages.engines.onnx.bundle import ModelInfo
from stages.engines.onnx.formats import SideCodec, read_numbers
from stages.policies.arithmetic_onnx import Body
from stages.policies.policy import PAGE_TOKENS, SIDES, Eviction, KVPolicy, Side

MASKED = {"float32": -1e30, "float16": -6e4}
"""Score of a masked position. Its exp underflows to 0, and unlike -inf it never causes NaN."""

INT32 = onnx.TensorProto.INT32


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention in the graph of a bundle."""

    info: ModelInfo
    policy: KVPolicy
    layer: int

    @property
    def window(self) -> int | None:
        return self.info.shape.window(self.layer)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.info.q_heads // self.info.kv_heads

    @property
    def sides(self) -> dict[Side, SideCodec]:
        return SideCodec.of_layer(self.policy, self.info.shape, self.layer)

    @property
    def tables(self) -> dict[str, tuple[str, ...]]:
        """Named dimensions of the int32 inputs that all layers share, by input."""
        tables: dict[str, tuple[str, ...]] = {"page_table": ("B", "P"), "lengths": ("B",)}
        if self.policy.window is not None:
            tables |= {"window_base_table": ("B", "Y"), "window_table": ("B", "Y"), "window_starts": ("B",)}
        return tables | ({"exact_slots": ("B",)} if self.policy.exact_tokens else {})

    @property
    def inputs(self) -> list[str]:
        """Names of the function's inputs, in order."""
        return ["query", "key", "value", *(["sinks"] if self.info.sinks else []), *self.tables, *self.cache]

    @property
    def cache(self) -> list[str]:
        """Names of the inputs that belong to this layer, without the layer number."""
        names = [name for codec in self.sides.values() for name in (*codec.arrays, *codec.constants)]
        return [*names, *(["key_exact", "value_exact"] if self.policy.exact_tokens else [])]


def attention_function(spec: AttentionSpec) -> onnx.FunctionProto:
    """Return kv.PagedAttention: query (B, Hq, S, D), key and value (B, H, S, D), sinks (Hq,) -> (B, S, Hq, D).

    The other inputs are the tables and the cache.
    """
    info = spec.info
    body, heads, dim = Body(info.compute_dtype), info.kv_heads, info.head_dim
    query, key, value = (body.from_activations(name) for name in ("query", "key", "value"))
    q = body.op("Mul", body.reshape(query, 0, heads, -1, dim), body.real(info.scaling))
    keys, values = (_regions(body, spec, side) for side in SIDES)
    exact = spec.policy.exact_tokens
    low = _first_positions(body, spec)
    masks = _pool_masks(body, spec, low)

    masked = body.real(MASKED[body.compute])
    products = [_dot_products(body, codec.rotate(body, q), read_numbers(body, codec, index)) for codec, index in keys]
    parts = [body.op("Where", body.concatenate(masks), _softcap(body, spec, body.concatenate(products)), masked)]
    if exact:
        scores = _softcap(body, spec, _dot_products(body, q, _exact_rows(body, "key_exact")))
        parts.append(body.op("Where", _exact_mask(body, spec.policy, low), scores, masked))
    parts.append(_new_scores(body, spec, q, key, masked))

    if info.sinks:  # a column of the softmax that no slice below reads
        parts.insert(0, _sink_scores(body, spec))
    p = body.op("Softmax", body.concatenate(parts), axis=-1)
    sizes = [_positions_of(body, index) for _, index in values] + ([body.ints([exact])] if exact else [])
    ends = [body.ints([int(info.sinks)])]
    for size in sizes:
        ends.append(body.op("Add", ends[-1], size))
    pieces = [body.op("Slice", p, *span, body.ints([3])) for span in pairwise([*ends, body.ints([2**31 - 1])])]
    out = body.op("MatMul", pieces[-1], value)
    if exact:
        out = body.op("Add", out, body.op("MatMul", pieces[-2], _exact_rows(body, "value_exact")))
    for (codec, index), piece in zip(values, pieces, strict=False):
        sums = body.op("MatMul", piece, read_numbers(body, codec, index))
        out = body.op("Add", out, codec.rotate(body, sums))
    split = body.op("Reshape", body.to_activations(out), _shape(body, 0, info.q_heads, "S", dim))
    body.op("Transpose", split, perm=[0, 2, 1, 3], out="attended")
    return body.function("PagedAttention", spec.layer, spec.inputs, ["attended"])


def quantize_function(layer: int, codec: SideCodec, compute: str) -> onnx.FunctionProto:
    """Return kv.Quantize<Side>: x (B, H, S, D) and static parameters -> the arrays of `codec.arrays`, in order."""
    body = Body(compute)
    encoded = codec.encode(body, body.from_activations("x"))
    return body.function(quantize_name(codec.side), layer, ["x", *codec.constants], encoded)


def quantize_name(side: Side) -> str:
    """Return the function's name without the layer, such as QuantizeWindowKey."""
    return "Quantize" + "".join(word.capitalize() for word in side.split("_"))


def _regions(body: Body, spec: AttentionSpec, side: Side) -> list[tuple[SideCodec, str]]:
    """Return (codec, blocks) of each copy that attention reads, oldest first; blocks: (page, head), int32 (B, H, pages)."""
    base, window = spec.sides[side], spec.sides.get(side.window)
    if spec.policy.window is None:
        return [(base, _page_index(body, "page_table", base.kv_heads))]
    if window is not None:
        return [
            (codec, _page_index(body, table, codec.kv_heads))
            for codec, table in ((base, "page_table"), (window, "window_table"))
        ]
    pages = body.op("Concat", "page_table", "window_base_table", axis=1)
    return [(base, _page_index(body, pages, base.kv_heads))]


def _page_index(body: Body, table: str, heads: int) -> str:
    """Return the blocks (page, head) of a page table (B, pages)."""
    pages = body.op("Mul", body.op("Unsqueeze", table, body.ints([1])), body.const(heads, "int32"))
    return body.op("Add", pages, body.const([[[h] for h in range(heads)]], "int32"))


def _positions_of(body: Body, pages: str) -> str:
    """Return the number of pool positions of a table or index (..., pages), int64 (1,)."""
    return body.op("Mul", body.op("Shape", pages, start=-1), body.ints([PAGE_TOKENS]))


def _first_positions(body: Body, spec: AttentionSpec) -> str | None:
    """Return the first position that a row attends to, int32 (B, 1, R, 1); None without a sliding window."""
    if spec.window is None:
        return None
    first = body.op("Sub", _per_sequence(body, "lengths"), body.const(spec.window - 1, "int32"))
    steps = body.op("Tile", _steps(body, _new_tokens(body)), body.ints([spec.group]))
    return body.op("Add", first, body.reshape(steps, 1, 1, -1, 1))


def _pool_masks(body: Body, spec: AttentionSpec, low: str | None) -> list[str]:
    """Return masks of the pool positions to attend to, bool (B, 1, 1, T): one, or two for pages before and in the window.

    `low` is the result of `_first_positions`. In a sliding-window layer the masks depend on the row: (B, 1, R, T).
    """
    end = _per_sequence(body, "lengths")
    if spec.policy.recent_tokens:
        end = body.op("Sub", end, body.const(spec.policy.recent_tokens, "int32"))
    positions_before = _steps(body, _positions_of(body, "page_table"))
    if spec.policy.window is None:
        regions = [(positions_before, end)]
    else:
        start = _per_sequence(body, "window_starts")
        positions_inside = _steps(body, _positions_of(body, "window_table"))
        regions = [(positions_before, body.op("Min", end, start)), (body.op("Add", positions_inside, start), end)]
    masks = []
    for positions, limit in regions:
        mask = body.op("Less", positions, limit)
        if spec.policy.eviction is not None and spec.policy.eviction.gap:
            mask = body.op("And", mask, _beyond_gap(body, spec.policy.eviction, positions))
        if spec.policy.sink_tokens:
            after_sinks = body.op("GreaterOrEqual", positions, body.const(spec.policy.sink_tokens, "int32"))
            mask = body.op("And", mask, after_sinks)
        masks.append(_mask_before(body, mask, positions, low))
    return masks


def _beyond_gap(body: Body, eviction: Eviction, positions: str) -> str:
    """Return the mask of positions to read: outside the eviction's gap, or all if the cache is shorter than `gap_length`."""
    gap = eviction.gap
    sink = body.op("Less", positions, body.const(gap.start, "int32"))
    later = body.op("GreaterOrEqual", positions, body.const(gap.stop, "int32"))
    short = body.op("Less", _per_sequence(body, "lengths"), body.const(eviction.gap_length, "int32"))
    return body.op("Or", body.op("Or", sink, later), short)


def _exact_mask(body: Body, policy: KVPolicy, low: str | None) -> str:
    """Return the mask of the exact slots to attend to, bool (B, 1, 1, E), or (B, 1, R, E) in a sliding-window layer."""
    sink, recent = policy.sink_tokens, policy.recent_tokens
    lengths = _per_sequence(body, "lengths")
    parts = []
    if sink:
        slots = body.const(range(sink), "int32")
        parts.append(_mask_before(body, body.op("Less", slots, lengths), slots, low))
    if recent:
        # The slot of residue r holds position length - 1 - age, age = (length - 1 - r) mod recent.
        newest = body.op("Sub", lengths, body.const(1, "int32"))
        shifted = body.op("Add", newest, body.const([recent - r for r in range(recent)], "int32"))
        age = body.op("Mod", shifted, body.const(recent, "int32"))
        positions = body.op("Sub", newest, age)
        counts = body.op("GreaterOrEqual", positions, body.const(sink, "int32"))
        parts.append(_mask_before(body, counts, positions, low))
    return body.concatenate(parts)


def _mask_before(body: Body, mask: str, positions: str, low: str | None) -> str:
    return mask if low is None else body.op("And", mask, body.op("GreaterOrEqual", positions, low))


def _exact_rows(body: Body, name: str) -> str:
    """Gather the batch's rows from exact buffers (M, H, E, D) float16: (B, H, E, D) in the compute dtype."""
    return body.to_compute(body.op("Gather", name, "exact_slots", axis=0))


def _new_scores(body: Body, spec: AttentionSpec, q: str, key: str, masked: str) -> str:
    """Return the scores among the new tokens, (B, H, R, S), causal and within the layer's window."""
    scores = _softcap(body, spec, _dot_products(body, q, key))
    steps = _steps(body, _new_tokens(body))
    rows = body.op("Unsqueeze", steps, body.ints([1]))
    causal = body.op("LessOrEqual", steps, rows)
    if spec.window is not None:
        causal = _mask_before(body, causal, steps, body.op("Sub", rows, body.const(spec.window - 1, "int32")))
    heads = spec.info.kv_heads
    by_query = body.op("Reshape", scores, _shape(body, 0, heads, spec.group, "S", "S"))
    return body.op("Reshape", body.op("Where", causal, by_query, masked), _shape(body, 0, heads, -1, "S"))


def _softcap(body: Body, spec: AttentionSpec, scores: str) -> str:
    if spec.info.softcap is None:
        return scores
    cap = body.real(spec.info.softcap)
    return body.op("Mul", body.op("Tanh", body.op("Div", scores, cap)), cap)


def _sink_scores(body: Body, spec: AttentionSpec) -> str:
    """Return the learned sink score of every query row, (B, H, R, 1)."""
    heads, group = spec.info.kv_heads, spec.group
    by_head = body.reshape(body.from_activations("sinks"), 1, heads, group, 1)
    batch = body.op("Shape", "query", start=0, end=1)
    dims = body.op("Concat", batch, body.ints([heads, group]), _new_tokens(body), axis=0)
    return body.reshape(body.op("Expand", by_head, dims), 0, heads, -1, 1)


def _new_tokens(body: Body) -> str:
    return body.op("Shape", "query", start=2, end=3)


def _shape(body: Body, *dims: int | str) -> str:
    """Return a shape; "S" stands for the number of new tokens."""
    return body.op("Concat", *(_new_tokens(body) if d == "S" else body.ints([int(d)]) for d in dims), axis=0)


def _steps(body: Body, count: str) -> str:
    """Return the range 0 to count - 1, int32."""
    end = body.op("Cast", body.op("Squeeze", count, body.ints([0])), to=INT32)
    return body.op("Range", body.const(0, "int32"), end, body.const(1, "int32"))


def _per_sequence(body: Body, name: str) -> str:
    return body.reshape(name, -1, 1, 1, 1)


def _dot_products(body: Body, q: str, k: str) -> str:
    return body.op("MatMul", q, body.op("Transpose", k, perm=[0, 1, 3, 2]))
