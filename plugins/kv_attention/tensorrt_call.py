"""One call of a plugin operation in a network: the cache that its tensors and attributes describe, and its validation.

Shapes: as in tensorrt_nodes. A dimension is fixed, or varies within an optimization profile. Tensors are descriptors of
TensorRT's Python package (tensorrt.plugin.TensorDesc), which this module does not import.
"""

import math
from dataclasses import dataclass
from typing import Any

from plugins.kv_attention.kernels.context_variants import WIDEST, context_splits
from plugins.kv_attention.kernels.variants import Setting
from plugins.kv_attention.layout import HEAD_DIMS, CacheLayout, Granularity, SideLayout
from plugins.kv_attention.tensorrt_nodes import DATA_TYPES, FORMATS, Compute, Node, bits_float, input_specs

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
