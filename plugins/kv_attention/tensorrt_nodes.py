"""Graph nodes of the plugin's operations: names, ordered tensors, integer attributes, and the check of a call in a network.

Imports neither TensorRT nor Triton: tensors are descriptors of TensorRT's Python package (tensorrt.plugin.TensorDesc).

Shapes: B sequences, Hq query heads on H KV heads, D head_dim, P pages of a sequence, N pages, M exact buffers,
E exact slots, W storage elements and g stored scales of a token, Y programs of a KV head, R parts, X new tokens of each
sequence, S splits of their results.

    kv::plan_work       lengths (B) -> work (Y, 5), sequences (B, 4), once a step for all layers with the same exact tokens
    kv::decode_partial  query (B, Hq, 1, D), key, value (B, H, 1, D), key_pool, value_pool (N, H, 64, W)[, scales of keys]
                        [, scales of values], page_table (B, P), lengths (B), work, sequences[, key_exact,
                        value_exact (M, H, E, D), exact_slots (B)] -> partial_acc (R, Hq, D), partial_ml (R, Hq, 2)
    kv::decode_reduce   partial_acc, partial_ml, sequences -> out (B, 1, Hq, D)
    kv::context_partial query (B, X, Hq, D), key, value (B, X, H, D), the cache's tensors as in decode_partial
                        -> partial_acc (B, X, Hq, S, D), partial_ml (B, X, Hq, S, 2), S = splits + 1
    kv::context_reduce  partial_acc, partial_ml -> out (B, X, Hq, D)

partial_ml is float32, and so is partial_acc of float32 queries; that of float16 and bfloat16 ones is float16.
Static scales are `key_scale` (1, 1 or H, 1, 1) float32, dynamic ones `key_scale_pool` (N, H, 64, g) float16. nvfp4 has both,
`value_scale` (1, 1, 1, 1) and `value_scale_pool` (N, H, 64, g) float8. Inputs have the
names and shapes of the inputs of the ONNX graphs' local function kv.PagedAttention, whose node decode_partial and
decode_reduce replace. Their order is the order of the kernels' parameters, because TensorRT passes them in that order.

A TensorRT plugin has a fixed number of tensors, and an ahead-of-time plugin passes each of them to its kernel. Which tensors
exist depends on the layout. Each set of tensors is therefore an operation of its own, named after the tensors it takes:
`kv::decode_partial_kstatic_vdynamic_exact`. A single operation with one-element placeholders for absent tensors would give
kernels parameters that they do not have.
"""

import math
import struct
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from plugins.kv_attention.kernels.variants import WIDEST, Setting, context_splits
from plugins.kv_attention.layout import CODES, HEAD_DIMS, PAGE_TOKENS, CacheLayout, Dtype, Granularity, SideLayout

NAMESPACE = "kv"

Operation = Literal["plan_work", "decode_partial", "decode_reduce", "context_partial", "context_reduce"]
Layered = Literal["decode_partial", "context_partial"]
"""Operations on a cache: which tensors they take depends on its layout."""
Scales = Literal["none", "static", "dynamic", "blocks"]
SCALES: dict[Scales, tuple[str, ...]] = {
    "none": (),
    "static": ("scale",),
    "dynamic": ("scale_pool",),
    "blocks": ("scale", "scale_pool"),
}
"""The tensors of a side's scales, without the side."""
Compute = Literal["fp32", "fp16", "bf16"]
Spec = tuple[str, tuple[int | str, ...]]
"""Name of a trt.DataType and dimensions of a tensor; a dimension that may vary is its letter."""

FORMATS: dict[Dtype | Compute, int] = {"fp32": 0, **{dtype: codes.number for dtype, codes in CODES.items()}}
"""Values of the attributes key_format, value_format and out_format, which are those of nvinfer1::DataType."""

DATA_TYPES: dict[Dtype | Compute, str] = {"fp32": "FLOAT", **{dtype: codes.data_type for dtype, codes in CODES.items()}}

PARTIAL_TYPES: dict[Compute, str] = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "HALF"}
"""Names of the trt.DataType of partial_acc, by the type of the queries."""

_CACHE_ATTRIBUTES = ("key_format", "value_format", "value_group", "sink_tokens", "recent_tokens")
ATTRIBUTES: dict[Operation, tuple[str, ...]] = {
    "plan_work": ("sink_tokens", "recent_tokens", "programs", "sm"),
    "decode_partial": (*_CACHE_ATTRIBUTES, "scaling_bits", "sm"),
    "decode_reduce": ("out_format", "sm"),
    "context_partial": (*_CACHE_ATTRIBUTES, "splits", "scaling_bits", "sm"),
    "context_reduce": ("out_format", "sm"),
}
"""Attributes of each operation. All are required and int. value_group is the values' group size, or 0 without one; programs
counts the programs over the pages of a KV head, splits those over the pages for a block of query rows; scaling_bits is the
float32 factor of the scores, reinterpreted as int32; sm is the GPU's compute capability, for example 90."""


@dataclass(frozen=True)
class Node:
    """One operation as TensorRT registers it: a kernel with one set of tensors."""

    operation: Operation
    name: str
    """Name within NAMESPACE."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of its attributes, in order."""
        return ATTRIBUTES[self.operation]

    @property
    def plugin_id(self) -> str:
        """Name with namespace: `kv::decode_reduce`."""
        return f"{NAMESPACE}::{self.name}"


PLAN = Node("plan_work", "plan_work", ("lengths",), ("work", "sequences"))
REDUCE = Node("decode_reduce", "decode_reduce", ("partial_acc", "partial_ml", "sequences"), ("out",))
CONTEXT_REDUCE = Node("context_reduce", "context_reduce", ("partial_acc", "partial_ml"), ("out",))


def scales_of(side: SideLayout) -> Scales:
    """Return which scales a side has."""
    return "blocks" if side.layer_scale else "static" if side.static else "dynamic" if side.dynamic else "none"


def node_of(operation: Layered, layout: CacheLayout) -> Node:
    """Return the node of an operation that takes this layout's tensors."""
    return _node(operation, scales_of(layout.key), scales_of(layout.value), layout.exact_tokens > 0)


def all_nodes() -> list[Node]:
    """Return the nodes of every operation, for every set of tensors."""
    keys: tuple[Scales, ...] = ("none", "static", "dynamic")
    operations: tuple[Layered, ...] = ("decode_partial", "context_partial")
    return [PLAN, REDUCE, CONTEXT_REDUCE, *(_node(*choice) for choice in product(operations, keys, SCALES, (False, True)))]


def _node(operation: Layered, key: Scales, value: Scales, exact: bool) -> Node:
    sides: dict[str, Scales] = {"key": key, "value": value}
    scales = {name: [f"{name}_{tensor}" for tensor in SCALES[kind]] for name, kind in sides.items()}
    # Tensors stand in the order of the kernels' parameters.
    work = PLAN.outputs if operation == "decode_partial" else ()
    inputs = [
        *("query", *sides, "key_pool", "value_pool", *scales["key"], *scales["value"]),
        *("page_table", "lengths", *work, *(("key_exact", "value_exact", "exact_slots") if exact else ())),
    ]
    suffix = [f"{name[0]}{kind}" for name, kind in sides.items() if kind != "none"] + (["exact"] if exact else [])
    return Node(operation, "_".join([operation, *suffix]), tuple(inputs), ("partial_acc", "partial_ml"))


def input_specs(node: Node, layout: CacheLayout, compute: Compute, q_heads: int, splits: int = 0) -> dict[str, Spec]:
    """Return the type and shape of each of an operation's inputs, by name, in order."""
    heads, dim = layout.kv_heads, layout.head_dim
    sides = {"key": layout.key, "value": layout.value}
    activation = DATA_TYPES[compute]
    specs: dict[str, Spec] = {
        "query": (activation, ("B", q_heads, 1, dim)),
        "page_table": ("INT32", ("B", "P")),
        "lengths": ("INT32", ("B",)),
        "exact_slots": ("INT32", ("B",)),
        "work": ("INT32", ("Y", 5)),
        "sequences": ("INT32", ("B", 4)),
        "partial_acc": (PARTIAL_TYPES[compute], ("R", q_heads, dim)),
        "partial_ml": ("FLOAT", ("R", q_heads, 2)),
    }
    if node.operation.startswith("context"):
        specs |= {
            "query": (activation, ("B", "X", q_heads, dim)),
            "partial_acc": (PARTIAL_TYPES[compute], ("B", "X", q_heads, splits, dim)),
            "partial_ml": ("FLOAT", ("B", "X", q_heads, splits, 2)),
        }
    several = ("B", "X", heads, dim) if node.operation == "context_partial" else ("B", heads, 1, dim)
    rows = ("N", heads, PAGE_TOKENS)
    for name, side in sides.items():
        scales = heads if side.granularity == "per_head" else 1
        specs |= {
            name: (activation, several),
            f"{name}_pool": (DATA_TYPES[side.dtype], (*rows, side.width(dim))),
            f"{name}_scale_pool": ("FP8" if side.layer_scale else "HALF", (*rows, side.groups(dim))),
            f"{name}_scale": ("FLOAT", (1, scales, 1, 1)),
            f"{name}_exact": ("HALF", ("M", heads, layout.exact_tokens, dim)),
        }
    return {name: specs[name] for name in node.inputs}


def attributes_of(
    node: Node,
    layout: CacheLayout,
    *,
    sm: int,
    programs: int = 0,
    splits: int = 0,
    scaling: float = 1.0,
    out: Compute = "fp32",
) -> dict[str, int]:
    """Return an operation's attributes, in the order of ATTRIBUTES."""
    values = {
        "key_format": FORMATS[layout.key.dtype],
        "value_format": FORMATS[layout.value.dtype],
        "value_group": layout.value.group_size or 0,
        "sink_tokens": layout.sink_tokens,
        "recent_tokens": layout.recent_tokens,
        "programs": programs,
        "splits": splits,
        "scaling_bits": float_bits(scaling),
        "out_format": FORMATS[out],
        "sm": sm,
    }
    return {name: values[name] for name in node.attributes}


def float_bits(value: float) -> int:
    """Return the bits of a float32 as an int32, for attributes, which can only be integers."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def bits_float(bits: int) -> float:
    """Return the float32 of the given bits, the inverse of float_bits."""
    value: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return value


COMPUTE: dict[Compute, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Types that activations may have, and torch's names of them."""

MIN_NORMAL = 2.0**-126
"""Smallest normal float32. An integer that is not the bits of a float32 is likely to read as less."""


@dataclass(frozen=True)
class Call:
    """One call of an operation in a network: its tensors and attributes by name. Properties raise ValueError, as `check`."""

    node: Node
    tensors: dict[str, Any]
    attributes: dict[str, int]

    def dims(self, name: str) -> list[int | None]:
        """Return a tensor's dimensions, None for those that vary."""
        tensor = self.tensors[name]
        if tensor.has_shape:
            return [None if dim == -1 else dim for dim in tensor.shape]
        return [dim.constant_value() if dim.is_constant else None for dim in tensor.shape_expr]

    def fixed(self, name: str, axis: int, what: str) -> int:
        """Return a dimension that the kernel is compiled for."""
        size = self.dims(name)[axis]
        if size is None:
            raise ValueError(f"{self.node.plugin_id}: {what} must be fixed, but dimension {axis} of {name} varies")
        return size

    def size(self, name: str, axis: int) -> Any:
        """Return a dimension, as a symbolic expression if it varies."""
        size = self.dims(name)[axis]
        return self.tensors[name].shape_expr[axis] if size is None else size

    def format(self, attribute: str) -> Any:
        """Return the name of the format in an attribute."""
        names = [name for name, code in FORMATS.items() if code == self.attributes[attribute]]
        if not names:
            known = ", ".join(f"{code} ({name})" for name, code in FORMATS.items())
            raise ValueError(f"{self.node.plugin_id}: {attribute} must be one of {known}, got {self.attributes[attribute]}")
        return names[0]

    @property
    def compute(self) -> Compute:
        """Type of the new keys, or of the result that partial results are joined to; float32 for a work list."""
        if "out_format" in self.attributes:
            out: Compute = self.format("out_format")
            if out not in COMPUTE:
                raise ValueError(f"{self.node.plugin_id}: out_format must be that of {', '.join(COMPUTE)}, got {out}")
            return out
        if "key" not in self.tensors:
            return "fp32"
        key_type = self.tensors["key"].dtype.name
        for name in COMPUTE:
            if DATA_TYPES[name] == key_type:
                return name
        types = ", ".join(DATA_TYPES[name] for name in COMPUTE)
        raise ValueError(f"{self.node.plugin_id}: key must be {types}, got {key_type}")

    @property
    def layout(self) -> CacheLayout:
        """Format of the cache that the attributes and shapes describe."""
        if self.node.operation in ("plan_work", "decode_reduce", "context_reduce"):
            # Work lists and partial sums have one format for every cache: any sides and any head_dim will do.
            partial = "partial_acc" in self.tensors
            axis = 2 if self.node.operation == "decode_reduce" else 4
            dim = self.fixed("partial_acc", axis, "head_dim") if partial else HEAD_DIMS[0]
            exact = (self.attributes.get(f"{name}_tokens", 0) for name in ("sink", "recent"))
            return CacheLayout(self.q_heads, dim, SideLayout("fp16"), SideLayout("fp16"), *exact)
        heads = self.fixed("key", self._heads_axis, "the number of KV heads")
        dim, group = self.fixed("key", 3, "head_dim"), self.attributes["value_group"]
        sinks, recent = self.attributes["sink_tokens"], self.attributes["recent_tokens"]
        try:
            return CacheLayout(heads, dim, self._side("key", None), self._side("value", group or None), sinks, recent)
        except ValueError as error:
            raise ValueError(f"{self.node.plugin_id}: {error}") from error

    def _side(self, name: str, group: int | None) -> SideLayout:
        granularity: Granularity = "none"
        if f"{name}_scale_pool" in self.tensors:
            granularity = "per_group" if group else "per_token"
        elif f"{name}_scale" in self.tensors:
            several = self.fixed(f"{name}_scale", 1, f"the number of scales of {name}") > 1
            granularity = "per_head" if several else "per_tensor"
        return SideLayout(self.format(f"{name}_format"), granularity, group)

    @property
    def q_heads(self) -> int:
        """Hq, query heads; 1 for a work list, which is the same for any number."""
        if self.node.operation == "plan_work":
            return 1
        return self.fixed(self.node.inputs[0], self._heads_axis, "the number of heads")

    @property
    def _heads_axis(self) -> int:
        """Dimension of the heads in the first input."""
        return 1 if self.node.operation in ("decode_partial", "decode_reduce") else 2

    @property
    def scaling(self) -> float:
        """Factor of the scores before the softmax; 1 where there are none."""
        return bits_float(self.attributes["scaling_bits"]) if "scaling_bits" in self.attributes else 1.0

    @property
    def setting(self) -> Setting:
        """What the kernel is compiled for: of several new tokens, for a chunk of a prompt."""
        layout, splits = self.layout, max(1, self.splits - 1)
        group = self.q_heads // layout.kv_heads
        return Setting(layout, COMPUTE[self.compute], self.attributes["sm"], group, self.scaling, WIDEST, splits)

    @property
    def splits(self) -> int:
        """S, splits of the partial results of context_partial and context_reduce; 0 for the others, which have none."""
        if self.node.operation == "context_partial":
            return context_splits(self.attributes["splits"])
        return self.fixed("partial_acc", 3, "the number of splits") if self.node.operation == "context_reduce" else 0

    def check(self) -> None:
        """Check the types and shapes of all inputs, and the attributes."""
        layout = self.layout
        if self.q_heads % layout.kv_heads:
            raise ValueError(f"{self.node.plugin_id}: {self.q_heads} query heads are no multiple of {layout.kv_heads} KV heads")
        for name, minimum in (("programs", 1), ("splits", 1), ("sm", 80)):
            if self.attributes.get(name, minimum) < minimum:
                raise ValueError(f"{self.node.plugin_id}: {name} must be at least {minimum}, got {self.attributes[name]}")
        if "scaling_bits" in self.attributes and not MIN_NORMAL <= self.scaling < math.inf:
            raise ValueError(f"{self.node.plugin_id}: scaling_bits must be those of a float32 above 0, got {self.scaling}")
        sizes: dict[str, int] = {}
        for name, (dtype, spec) in input_specs(self.node, layout, self.compute, self.q_heads, self.splits).items():
            dims, tensor_type = self.dims(name), self.tensors[name].dtype.name
            if tensor_type != dtype:
                packed = " (two codes to a byte)" if tensor_type in ("INT4", "UINT8") else ""
                raise ValueError(f"{self.node.plugin_id}: {name} must be {dtype}{packed}, got {tensor_type}")
            if not _fits(dims, spec, sizes):
                shape = ", ".join("varies" if dim is None else str(dim) for dim in dims)
                expected = ", ".join(str(sizes.get(str(dim), dim)) for dim in spec)
                raise ValueError(f"{self.node.plugin_id}: {name} must be ({expected}), got ({shape})")


def _fits(dims: list[int | None], spec: tuple[int | str, ...], sizes: dict[str, int]) -> bool:
    """Whether dimensions match a specification. `sizes`: the size of each letter so far; the sizes of new letters are added."""
    return len(dims) == len(spec) and all(
        dim == size if isinstance(size, int) else dim is None or sizes.setdefault(size, dim) == dim
        for dim, size in zip(dims, spec, strict=True)
    )
