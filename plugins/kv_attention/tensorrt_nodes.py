"""Graph nodes of the plugin's operations: names, ordered tensors, attributes, and the check of a call in a network.

Imports neither TensorRT nor Triton: tensors are descriptors of TensorRT's Python package (tensorrt.plugin.TensorDesc).

Shapes: B sequences, Hq query heads on H KV heads, D head_dim, P pages of a sequence, N pages, M exact buffers, E exact slots,
W storage elements and g stored scales of a token, Y programs of a KV head, R parts, X new tokens per sequence, S partial
results of a new token and query head.

    kv::plan_work       lengths (B) -> work (Y, 5), sequences (B, 4), once a step for all layers with the same exact tokens
    kv::decode_partial  query (B, Hq, 1, D), key, value (B, H, 1, D), key_pool, value_pool (N, H, 64, W)[, scales of keys]
                        [, scales of values], page_table (B, P), lengths (B), work, sequences[, key_exact,
                        value_exact (M, H, E, D), exact_slots (B)] -> partial_acc (R, Hq, D), partial_ml (R, Hq, 2)
    kv::decode_reduce   partial_acc, partial_ml, sequences -> out (B, 1, Hq, D)
    kv::context_partial query (B, X, Hq, D), key, value (B, X, H, D), the cache's tensors as in decode_partial
                        -> partial_acc (B, X, S, Hq, D), partial_ml (B, X, S, Hq, 2), S = splits + 1
    kv::context_reduce  partial_acc, partial_ml -> out (B, X, Hq, D)

partial_ml is float32. partial_acc is float32 for float32 queries, else float16. Static scales are `key_scale` (1, n, 1, 1)
with n = 1 or H, float32; dynamic scales are `key_scale_pool` (N, H, 64, g) float16. nvfp4 has both: `value_scale`
(1, 1, 1, 1) float32 and `value_scale_pool` (N, H, 64, g) float8.

In an ONNX graph, decode_partial and decode_reduce replace a call of the local function kv.PagedAttention. The inputs of
decode_partial, except work and sequences, therefore have the names and shapes of that function's inputs. Inputs are in the
order of the kernels' parameters, because TensorRT passes them in that order.

A TensorRT plugin has a fixed number of tensors, and an ahead-of-time plugin passes all of them to its kernel. The layout
decides which tensors exist. Each set of tensors is therefore a separate operation, named after its tensors:
`kv::decode_partial_kstatic_vdynamic_exact`. A single operation with one-element placeholders for absent tensors would give
kernels parameters that they do not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

from plugins.kv_attention.layout import CacheLayout, Dims, Dtype, Granularity, SideLayout, dimension_problem
from plugins.kv_attention.variants import MAX_BLOCK_ROWS, Compute, Setting, context_splits, partial_dtype

NAMESPACE = "kv"

Operation = Literal["plan_work", "decode_partial", "decode_reduce", "context_partial", "context_reduce"]
CacheOperation = Literal["decode_partial", "context_partial"]
"""Operations that read a cache; their tensors depend on the cache's layout."""
Scales = Literal["none", "static", "dynamic", "blocks"]
SCALES: dict[Scales, tuple[str, ...]] = {
    "none": (),
    "static": ("scale",),
    "dynamic": ("scale_pool",),
    "blocks": ("scale", "scale_pool"),
}
"""Tensors of a side's scales, without the prefix `key_` or `value_`."""

DTYPES, GRANULARITIES, COMPUTES = get_args(Dtype), get_args(Granularity), get_args(Compute)
"""Choices; an attribute is the index of a choice."""

_INTEGERS = (
    *("kv_heads", "head_dim", "key_dtype", "key_granularity", "value_dtype", "value_granularity", "value_group"),
    *("sink_tokens", "recent_tokens", "dtype", "sm", "group", "programs"),
)
ATTRIBUTES: dict[str, type] = {**dict.fromkeys(_INTEGERS, int), "scaling": float}
"""Types of the attributes of every operation: the fields of the setting that its kernel is compiled for, and `programs`, which
is the number of programs per KV head in a decode step, and of splits over the pages in a prefill. All are required.
value_group is the values' group size, or 0 without groups. No attribute is a string: with numpy 2 TensorRT's Python package
passes only its first letter."""

Spec = tuple[str, Dims]
"""Element type of a tensor, as torch names it, and its dimensions; a dimension that may vary is a letter."""

DATA_TYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8",
    "int8": "INT8",  # also two 4-bit codes per byte, because a plugin supports neither INT4 nor FP4
    "int32": "INT32",
}
"""torch's name of an element type -> TensorRT's name."""


@dataclass(frozen=True)
class Node:
    """One operation as TensorRT registers it: a kernel with one set of tensors."""

    operation: Operation
    name: str
    """Name within NAMESPACE."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

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


def node_of(operation: CacheOperation, layout: CacheLayout) -> Node:
    """Return the node of an operation that takes this layout's tensors."""
    return _node(operation, scales_of(layout.key), scales_of(layout.value), layout.exact_tokens > 0)


def all_nodes() -> list[Node]:
    """Return the nodes of every operation, for every set of tensors."""
    keys: tuple[Scales, ...] = ("none", "static", "dynamic")
    operations: tuple[CacheOperation, ...] = ("decode_partial", "context_partial")
    return [PLAN, REDUCE, CONTEXT_REDUCE, *(_node(*choice) for choice in product(operations, keys, SCALES, (False, True)))]


def _node(operation: CacheOperation, key: Scales, value: Scales, exact: bool) -> Node:
    sides: dict[str, Scales] = {"key": key, "value": value}
    scales = {name: [f"{name}_{tensor}" for tensor in SCALES[kind]] for name, kind in sides.items()}
    # Tensors are in the order of the kernels' parameters.
    work = PLAN.outputs if operation == "decode_partial" else ()
    inputs = [
        *("query", *sides, "key_pool", "value_pool", *scales["key"], *scales["value"]),
        *("page_table", "lengths", *work, *(("key_exact", "value_exact", "exact_slots") if exact else ())),
    ]
    suffix = [f"{name[0]}{kind}" for name, kind in sides.items() if kind != "none"] + (["exact"] if exact else [])
    return Node(operation, "_".join([operation, *suffix]), tuple(inputs), ("partial_acc", "partial_ml"))


def input_specs(node: Node, setting: Setting, programs: int) -> dict[str, Spec]:
    """Return the type and shape of an operation's inputs, by name, in order."""
    layout, dtype, dim = setting.layout, setting.dtype, setting.layout.head_dim
    is_context = node.operation.startswith("context")
    parts: Dims = ("B", "X", context_splits(programs), setting.q_heads) if is_context else ("R", setting.q_heads)

    def tokens(heads: int) -> Dims:
        return ("B", "X", heads, dim) if is_context else ("B", heads, 1, dim)

    specs: dict[str, Spec] = {
        **layout.tensor_dims(),
        **{name: (kind, (1, *shape, 1, 1)) for name, (kind, shape) in layout.static_scales().items()},
        "query": (dtype, tokens(setting.q_heads)),
        "key": (dtype, tokens(layout.kv_heads)),
        "value": (dtype, tokens(layout.kv_heads)),
        "page_table": ("int32", ("B", "P")),
        "lengths": ("int32", ("B",)),
        "exact_slots": ("int32", ("B",)),
        "work": ("int32", ("Y", 5)),
        "sequences": ("int32", ("B", 4)),
        "partial_acc": (partial_dtype(dtype), (*parts, dim)),
        "partial_ml": ("float32", (*parts, 2)),
    }
    return {name: specs[name] for name in node.inputs}


def attributes_of(setting: Setting, programs: int) -> dict[str, int | float]:
    """Return the attributes of an operation."""
    layout = setting.layout
    return {
        "kv_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "key_dtype": DTYPES.index(layout.key.dtype),
        "key_granularity": GRANULARITIES.index(layout.key.granularity),
        "value_dtype": DTYPES.index(layout.value.dtype),
        "value_granularity": GRANULARITIES.index(layout.value.granularity),
        "value_group": layout.value.group_size or 0,
        "sink_tokens": layout.sink_tokens,
        "recent_tokens": layout.recent_tokens,
        "dtype": COMPUTES.index(setting.dtype),
        "sm": setting.sm or 0,
        "group": setting.group,
        "scaling": setting.scaling,
        "programs": programs,
    }


def read_setting(node: Node, values: Mapping[str, Any]) -> Setting:
    """Return the setting that a node's attributes describe, with `rows` of a prompt chunk. Raises ValueError."""

    def named(attribute: str, names: tuple[Any, ...]) -> Any:
        if values[attribute] not in range(len(names)):
            choices = ", ".join(f"{number} ({name})" for number, name in enumerate(names))
            raise ValueError(f"{attribute} must be one of {choices}, got {values[attribute]}")
        return names[values[attribute]]

    try:
        key = SideLayout(named("key_dtype", DTYPES), named("key_granularity", GRANULARITIES))
        value = SideLayout(
            named("value_dtype", DTYPES), named("value_granularity", GRANULARITIES), values["value_group"] or None
        )
        exact = values["sink_tokens"], values["recent_tokens"]
        layout = CacheLayout(values["kv_heads"], values["head_dim"], key, value, *exact)
        dtype = named("dtype", COMPUTES)
        return Setting(layout, dtype, values["sm"], values["group"], values["scaling"], MAX_BLOCK_ROWS)
    except ValueError as error:
        raise ValueError(f"{node.plugin_id}: {error}") from error


@dataclass(frozen=True)
class Call:
    """One call of an operation in a network."""

    node: Node
    tensors: dict[str, Any]
    """Tensors by name, in order."""
    setting: Setting
    """Setting that the kernel is compiled for; a context kernel is compiled for a prompt chunk."""
    programs: int
    """Programs over the pages of a KV head, or splits over the pages."""

    def dims(self, name: str) -> list[int | None]:
        """Return a tensor's dimensions, None for a dimension that varies."""
        tensor = self.tensors[name]
        if tensor.has_shape:
            return [None if dim == -1 else dim for dim in tensor.shape]
        return [dim.constant_value() if dim.is_constant else None for dim in tensor.shape_expr]

    def size(self, name: str, axis: int) -> Any:
        """Return a dimension, as a symbolic expression if it varies."""
        size = self.dims(name)[axis]
        return self.tensors[name].shape_expr[axis] if size is None else size

    def check(self) -> None:
        """Check the attributes, and the types and shapes of all inputs. Raises ValueError."""
        node, setting = self.node, self.setting
        match node.operation:
            case "decode_partial" | "context_partial" as operation:
                expected = node_of(operation, setting.layout)
                if expected != node:
                    raise ValueError(f"{node.plugin_id}: the setting's cache needs {expected.plugin_id}")
        for name, number, minimum in (("sm", setting.sm or 0, 80), ("programs", self.programs, 1)):
            if number < minimum:
                raise ValueError(f"{node.plugin_id}: {name} must be at least {minimum}, got {number}")
        sizes: dict[str, int] = {}
        for name, (dtype, spec) in input_specs(node, setting, self.programs).items():
            tensor_type = self.tensors[name].dtype.name
            if tensor_type != DATA_TYPES[dtype]:
                packed = " (two codes per byte)" if name == "value_pool" and setting.layout.value.packed else ""
                raise ValueError(f"{node.plugin_id}: {name} must be {DATA_TYPES[dtype]}{packed}, got {tensor_type}")
            problem = dimension_problem(name, self.dims(name), spec, sizes)
            if problem is not None:
                raise ValueError(f"{node.plugin_id}: {problem}")
