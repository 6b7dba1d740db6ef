"""Bodies of the `kv` functions for any KV policy: paged attention and the quantization of new tokens.

Shapes: B sequences, S new tokens each, Hq query heads on H KV heads (G = Hq / H), R = G * S query rows of a KV head, D
head_dim, P pages of a sequence, T = 64 * P pool positions, E = sink_tokens + recent_tokens exact slots, M exact buffers.

What a query sees: new tokens exactly (causal), sinks and the last `recent_tokens` before the chunk from float16 buffers,
everything else from the quantized pool. Every token is in the pool too; positions that are seen exactly are masked there.
A sink's slot is its position; slot sink + position % recent holds the newest token of that residue.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import onnx

from pipeline.kv import PAGE_TOKENS, KVPolicy, KVShape
from stages.onnx.formats import Side
from stages.onnx.graph import Body

Mode = Literal["prefill", "decode"]
MASKED = {"float32": -1e30, "float16": -6e4}
"""Score of a position that must not be seen: exp underflows to 0, and unlike -inf it never makes a NaN."""

INT32 = onnx.TensorProto.INT32


def scale_input(name: str, side: Side) -> str:
    """The function's input that holds one side's scales, "" when the format has none."""
    if side.form.static:
        return f"{name}_scale"
    return f"{name}_scale_pool" if side.groups else ""


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention function is specialised for."""

    policy: KVPolicy
    shape: KVShape
    q_heads: int
    scaling: float
    compute: str
    mode: Mode

    @property
    def key(self) -> Side:
        return Side(self.policy.key, self.shape.kv_heads, self.shape.head_dim)

    @property
    def value(self) -> Side:
        return Side(self.policy.value, self.shape.kv_heads, self.shape.head_dim)

    @property
    def inputs(self) -> list[str]:
        exact = ["key_exact", "value_exact", "exact_slots"] if self.policy.exact_tokens else []
        cache = ["key_pool", scale_input("key", self.key), "value_pool", scale_input("value", self.value)]
        return ["query", "key", "value", *filter(None, cache), "page_table", "lengths", *exact]


def attention_function(spec: AttentionSpec, layer: int) -> onnx.FunctionProto:
    """kv.PagedAttention: query (B, Hq, S, D), key and value (B, H, S, D), the cache -> (B, S, Hq, D)."""
    body, heads, dim = Body(spec.compute), spec.shape.kv_heads, spec.shape.head_dim
    group = spec.q_heads // heads
    q = body.op("Mul", body.reshape("query", 0, heads, -1, dim), body.real(spec.scaling))
    index = _page_index(body, heads)
    lengths = body.reshape("lengths", -1, 1, 1, 1)
    past = body.op("Mul", body.op("Shape", "page_table", start=1, end=2), body.ints([PAGE_TOKENS]))

    key_scale, value_scale = scale_input("key", spec.key), scale_input("value", spec.value)
    masked = body.real(MASKED[spec.compute])
    scores = spec.key.scores(body, q, "key_pool", key_scale, index)
    parts = [body.op("Where", _pool_mask(body, spec.policy, past, lengths), scores, masked)]
    exact = spec.policy.exact_tokens
    if exact:
        scores = _dot(body, q, _exact_rows(body, "key_exact"))
        parts.append(body.op("Where", _exact_mask(body, spec.policy, lengths), scores, masked))
    parts.append(_new_scores(body, spec, q, group, masked))

    p = body.op("Softmax", body.op("Concat", *parts, axis=-1), axis=-1)
    ends = [body.ints([0]), past]
    if exact:
        ends.append(body.op("Add", past, body.ints([exact])))
    ends.append(body.ints([2**31 - 1]))
    pieces = [body.op("Slice", p, start, end, body.ints([3])) for start, end in pairwise(ends)]
    out = spec.value.mix(body, pieces[0], "value_pool", value_scale, index)
    if exact:
        out = body.op("Add", out, body.op("MatMul", pieces[1], _exact_rows(body, "value_exact")))
    out = body.op("Add", out, body.op("MatMul", pieces[-1], "value"))
    if spec.mode == "decode":
        body.op("Reshape", out, body.ints([0, 1, spec.q_heads, dim]), out="attended")
    else:
        split = body.op("Reshape", out, _shape(body, 0, spec.q_heads, "S", dim))
        body.op("Transpose", split, perm=[0, 2, 1, 3], out="attended")
    return body.function("PagedAttention", layer, spec.inputs, ["attended"])


def quantize_function(name: str, layer: int, side: Side, compute: str) -> onnx.FunctionProto:
    """kv.QuantizeKey or kv.QuantizeValue: x (B, H, S, D) [, static scale (1,)] -> codes [, float16 scales]."""
    body = Body(compute)
    codes, scales = side.encode(body, "x", "scale" if side.form.static else "")
    inputs = ["x", "scale"] if side.form.static else ["x"]
    return body.function(name, layer, inputs, [codes, scales] if scales else [codes])


def _page_index(body: Body, heads: int) -> str:
    """Blocks (page, head) of each sequence's pages, int32 (B, H, P)."""
    pages = body.op("Mul", body.op("Unsqueeze", "page_table", body.ints([1])), body.const(heads, "int32"))
    return body.op("Add", pages, body.const([[[h] for h in range(heads)]], "int32"))


def _pool_mask(body: Body, policy: KVPolicy, past: str, lengths: str) -> str:
    """Whether a pool position is seen through the pool, bool (B, 1, 1, T)."""
    end = body.op("Cast", body.op("Squeeze", past, body.ints([0])), to=INT32)
    positions = body.op("Range", body.const(0, "int32"), end, body.const(1, "int32"))
    if policy.recent_tokens:
        lengths = body.op("Sub", lengths, body.const(policy.recent_tokens, "int32"))
    seen = body.op("Less", positions, lengths)
    if policy.sink_tokens:
        seen = body.op("And", seen, body.op("GreaterOrEqual", positions, body.const(policy.sink_tokens, "int32")))
    return seen


def _exact_mask(body: Body, policy: KVPolicy, lengths: str) -> str:
    """Whether an exact slot holds a position that is seen exactly, bool (B, 1, 1, E)."""
    sink, recent = policy.sink_tokens, policy.recent_tokens
    parts = []
    if sink:
        parts.append(body.op("Less", body.const(range(sink), "int32"), lengths))
    if recent:
        # The slot of residue r holds position length - 1 - age, age = (length - 1 - r) mod recent.
        newest = body.op("Sub", lengths, body.const(1, "int32"))
        shifted = body.op("Add", newest, body.const([recent - r for r in range(recent)], "int32"))
        age = body.op("Mod", shifted, body.const(recent, "int32"))
        parts.append(body.op("GreaterOrEqual", body.op("Sub", newest, age), body.const(sink, "int32")))
    return parts[0] if len(parts) == 1 else body.op("Concat", *parts, axis=-1)


def _exact_rows(body: Body, name: str) -> str:
    """Exact buffers (M, H, E, D) float16 of the batch's sequences, (B, H, E, D) in the compute dtype."""
    return body.to_compute(body.op("Gather", name, "exact_slots", axis=0))


def _new_scores(body: Body, spec: AttentionSpec, q: str, group: int, masked: str) -> str:
    """Scores of the new tokens among themselves, (B, H, R, S), causal."""
    scores = _dot(body, q, "key")
    if spec.mode == "decode":
        return scores
    length = body.op("Cast", body.op("Squeeze", _new_tokens(body), body.ints([0])), to=INT32)
    steps = body.op("Range", body.const(0, "int32"), length, body.const(1, "int32"))
    causal = body.op("LessOrEqual", steps, body.op("Unsqueeze", steps, body.ints([1])))
    heads = spec.shape.kv_heads
    by_query = body.op("Reshape", scores, _shape(body, 0, heads, group, "S", "S"))
    return body.op("Reshape", body.op("Where", causal, by_query, masked), _shape(body, 0, heads, -1, "S"))


def _new_tokens(body: Body) -> str:
    return body.op("Shape", "query", start=2, end=3)


def _shape(body: Body, *dims: int | str) -> str:
    """A shape in which "S" stands for the number of new tokens."""
    return body.op("Concat", *(_new_tokens(body) if d == "S" else body.ints([int(d)]) for d in dims), axis=0)


def _dot(body: Body, q: str, k: str) -> str:
    return body.op("MatMul", q, body.op("Transpose", k, perm=[0, 1, 3, 2]))
