"""The plugin's operations as nodes of a graph: names, tensors in order, integer attributes. No TensorRT, no Triton.

Shapes: L layers, B sequences, Hq query heads on H KV heads, D head_dim, P pages of a sequence, N pages, M exact buffers,
E exact slots, W storage elements and g stored scales of a token, S splits (one more than `splits` with exact tokens).

    kv::decode_partial  query (B, Hq, 1, D), key, value (B, H, 1, D), key_pool, value_pool (N, H, 64, W)[, scales of keys]
                        [, scales of values], page_table (B, P), lengths (B)[, key_exact, value_exact (M, H, E, D),
                        exact_slots (B)] -> partial_acc (B, Hq, S, D), partial_ml (B, Hq, S, 2) float32
    kv::decode_reduce   partial_acc, partial_ml -> out (B, 1, Hq, D)
    kv::append          key, value (L, B, H, D), page_table, lengths[, exact_slots], key_pool (L, N, H, 64, W)[, scales],
                        value_pool[, scales][, key_exact, value_exact (L, M, H, E, D)]; static scales are (L, 1 or H)
                        -> the pools, scale pools and exact buffers, each aliased to its input

Scales are `key_scale` (1, 1 or H, 1, 1) float32 when static, `key_scale_pool` (N, H, 64, g) float16 when dynamic. Inputs
have the names and shapes of those of the local function kv.PagedAttention of the ONNX graphs, whose node decode_partial and
decode_reduce replace; their order is that of the kernels' parameters, since TensorRT passes them so.

A TensorRT plugin has a fixed number of tensors, and an ahead-of-time one hands each of them to its kernel. Which tensors
there are depends on the layout, so that each set of tensors is an operation of its own, named after what it takes:
`kv::append_kstatic_vdynamic_exact`. One operation with one-element stand-ins for absent tensors would give every kernel
parameters that it does not have, and every append outputs that are aliased to nothing.
"""

import struct
from dataclasses import dataclass
from itertools import product
from typing import Literal

from plugins.kv_attention.layout import PAGE_TOKENS, CacheLayout, Dtype, SideLayout

NAMESPACE = "kv"

Operation = Literal["decode_partial", "decode_reduce", "append"]
Scales = Literal["none", "static", "dynamic"]
POOL: dict[Scales, str] = {"static": "", "dynamic": "_pool"}
Compute = Literal["fp32", "fp16", "bf16"]
Spec = tuple[str, tuple[int | str, ...]]
"""nvinfer1::DataType (trt.DataType's name) and dimensions of a tensor; those that may vary by their letter."""

FORMATS: dict[Dtype | Compute, int] = {"fp32": 0, "fp16": 1, "int8": 2, "fp8_e4m3": 6, "bf16": 7, "int4": 9}
"""What the attributes key_format, value_format and out_format say: the values of nvinfer1::DataType. int4 is the format of
the codes; TensorRT sees them two to a byte, as INT8, because a plugin takes no INT4."""

DATA_TYPES: dict[Dtype | Compute, str] = {
    "fp32": "FLOAT",
    "fp16": "HALF",
    "bf16": "BF16",
    "fp8_e4m3": "FP8",
    "int8": "INT8",
    "int4": "INT8",
}

_CACHE = ("key_format", "value_format", "value_group", "sink_tokens", "recent_tokens")
ATTRIBUTES: dict[Operation, tuple[str, ...]] = {
    "decode_partial": (*_CACHE, "splits", "scaling_bits", "sm"),
    "decode_reduce": ("out_format", "sm"),
    "append": (*_CACHE, "sm"),
}
"""All attributes, all required, all int. value_group is 0 where no group_size is given; splits counts those over pages;
scaling_bits is the float32 that scores are multiplied by, read as an int32; sm is the GPU's compute capability, 90 say."""


@dataclass(frozen=True)
class Node:
    """One operation as TensorRT knows it."""

    operation: Operation
    name: str
    """Within NAMESPACE."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def attributes(self) -> tuple[str, ...]:
        return ATTRIBUTES[self.operation]

    @property
    def plugin_id(self) -> str:
        return f"{NAMESPACE}::{self.name}"


REDUCE = Node("decode_reduce", "decode_reduce", ("partial_acc", "partial_ml"), ("out",))


def scales_of(side: SideLayout) -> Scales:
    """Where the scales of a side come from."""
    return "static" if side.static else "dynamic" if side.dynamic else "none"


def node_of(operation: Literal["decode_partial", "append"], layout: CacheLayout) -> Node:
    """The operation that takes this layout's tensors."""
    return _node(operation, scales_of(layout.key), scales_of(layout.value), layout.exact_tokens > 0)


def all_nodes() -> list[Node]:
    """Every operation there is."""
    kinds: tuple[Scales, ...] = ("none", "static", "dynamic")
    operations: tuple[Literal["decode_partial", "append"], ...] = ("decode_partial", "append")
    return [REDUCE, *(_node(*choice) for choice in product(operations, kinds, kinds, (False, True)))]


def _node(operation: Literal["decode_partial", "append"], key: Scales, value: Scales, exact: bool) -> Node:
    sides: dict[str, Scales] = {"key": key, "value": value}
    tables = ["page_table", "lengths"]
    buffers, slots = (["key_exact", "value_exact"], ["exact_slots"]) if exact else ([], [])
    scales = [f"{name}_scale{POOL[kind]}" for name, kind in sides.items() if kind != "none"]
    # In the order of the kernels' parameters.
    if operation == "decode_partial":
        inputs = ["query", *sides, "key_pool", "value_pool", *scales, *tables, *buffers, *slots]
        outputs = ["partial_acc", "partial_ml"]
    else:
        cache = ["key_pool", *scales[: key != "none"], "value_pool", *scales[key != "none" :], *buffers]
        inputs = [*sides, *tables, *slots, *cache]
        outputs = [name for name in cache if name not in ("key_scale", "value_scale")]
    suffix = [f"{name[0]}{scales}" for name, scales in sides.items() if scales != "none"] + (["exact"] if exact else [])
    return Node(operation, "_".join([operation, *suffix]), tuple(inputs), tuple(outputs))


def input_specs(node: Node, layout: CacheLayout, compute: Compute, q_heads: int, parts: int) -> dict[str, Spec]:
    """Types and shapes that an operation takes, by name in order. compute: of queries, keys and values; parts: S."""
    heads, dim = layout.kv_heads, layout.head_dim
    sides = {"key": layout.key, "value": layout.value}
    real = DATA_TYPES[compute]
    specs: dict[str, Spec] = {
        "query": (real, ("B", q_heads, 1, dim)),
        "page_table": ("INT32", ("B", "P")),
        "lengths": ("INT32", ("B",)),
        "exact_slots": ("INT32", ("B",)),
        "partial_acc": ("FLOAT", ("B", q_heads, parts, dim)),
        "partial_ml": ("FLOAT", ("B", q_heads, parts, 2)),
    }
    layers: tuple[int | str, ...] = ("L",) if node.operation == "append" else ()
    rows = (*layers, "N", heads, PAGE_TOKENS)
    for name, side in sides.items():
        scales = 1 if side.granularity == "per_tensor" else heads
        specs |= {
            name: (real, ("L", "B", heads, dim) if layers else ("B", heads, 1, dim)),
            f"{name}_pool": (DATA_TYPES[side.dtype], (*rows, side.width(dim))),
            f"{name}_scale_pool": ("HALF", (*rows, side.groups(dim))),
            f"{name}_scale": ("FLOAT", ("L", scales) if layers else (1, scales, 1, 1)),
            f"{name}_exact": ("HALF", (*layers, "M", heads, layout.exact_tokens, dim)),
        }
    return {name: specs[name] for name in node.inputs}


def cache_attributes(layout: CacheLayout, sm: int) -> dict[str, int]:
    """Attributes of the append."""
    return {
        "key_format": FORMATS[layout.key.dtype],
        "value_format": FORMATS[layout.value.dtype],
        "value_group": layout.value.group_size or 0,
        "sink_tokens": layout.sink_tokens,
        "recent_tokens": layout.recent_tokens,
        "sm": sm,
    }


def decode_attributes(layout: CacheLayout, *, splits: int, scaling: float, sm: int) -> dict[str, int]:
    """Attributes of the split attention, in the order of ATTRIBUTES."""
    found = cache_attributes(layout, sm) | {"splits": splits, "scaling_bits": float_bits(scaling)}
    return {name: found[name] for name in ATTRIBUTES["decode_partial"]}


def reduce_attributes(out: Compute, sm: int) -> dict[str, int]:
    """Attributes of the reduction, whose result has the element type of the query."""
    return {"out_format": FORMATS[out], "sm": sm}


def float_bits(value: float) -> int:
    """A float32 read as an int32: how a float travels where only integers do."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def bits_float(bits: int) -> float:
    """The inverse of float_bits. Raises struct.error beyond 32 bits."""
    value: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return value
