"""One use of an operation in a network, as TensorRT shows it to a plugin: what it asks for, and whether that makes sense.

Shapes: as in tensorrt_nodes. A dimension is fixed, or varies within an optimization profile. Tensors are descriptors of
TensorRT's Python package (tensorrt.plugin.TensorDesc), which this module does not import.
"""

import math
from dataclasses import dataclass
from typing import Any

from plugins.kv_attention.kernels.variants import partial_splits
from plugins.kv_attention.layout import CacheLayout, Granularity, SideLayout
from plugins.kv_attention.tensorrt_nodes import DATA_TYPES, FORMATS, Compute, Node, bits_float, input_specs

COMPUTE: dict[Compute, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""What activations may be, by torch's name."""

MIN_NORMAL = 2.0**-126
"""The smallest normal float32: an integer that is not meant as a float32's bits is likely to be below it."""


@dataclass(frozen=True)
class Call:
    """One use of an operation in a network: its tensors and attributes by name."""

    node: Node
    tensors: dict[str, Any]
    attributes: dict[str, int]

    def dims(self, name: str) -> list[int | None]:
        """A tensor's dimensions, None for those that vary."""
        tensor = self.tensors[name]
        if tensor.has_shape:
            return [None if dim == -1 else dim for dim in tensor.shape]
        return [dim.constant_value() if dim.is_constant else None for dim in tensor.shape_expr]

    def fixed(self, name: str, axis: int, what: str) -> int:
        """A dimension that the kernel is compiled for."""
        size = self.dims(name)[axis]
        if size is None:
            raise ValueError(f"{self.node.plugin_id}: {what} must be fixed, but dimension {axis} of {name} varies")
        return size

    def size(self, name: str, axis: int) -> Any:
        """A dimension, symbolic if it varies."""
        size = self.dims(name)[axis]
        return self.tensors[name].shape_expr[axis] if size is None else size

    def format(self, attribute: str) -> Any:
        """The name of the format that an attribute says."""
        found = [name for name, code in FORMATS.items() if code == self.attributes[attribute]]
        if not found:
            known = ", ".join(f"{code} ({name})" for name, code in FORMATS.items())
            raise ValueError(f"{self.node.plugin_id}: {attribute} must be one of {known}, got {self.attributes[attribute]}")
        return found[0]

    @property
    def compute(self) -> Compute:
        """The type that keys come in."""
        found = self.tensors["key"].dtype.name
        for name in COMPUTE:
            if DATA_TYPES[name] == found:
                return name
        raise ValueError(f"{self.node.plugin_id}: key must be {', '.join(DATA_TYPES[name] for name in COMPUTE)}, got {found}")

    @property
    def layout(self) -> CacheLayout:
        """The cache that attributes and shapes describe. Raises ValueError for one that the kernels do not know."""
        if self.node.operation == "decode_reduce":
            # Partial sums are the same for every cache.
            return CacheLayout(1, self.fixed("partial_acc", 3, "head_dim"), SideLayout("fp16"), SideLayout("fp16"))
        heads = self.fixed("key", 2 if self.node.operation == "append" else 1, "the number of KV heads")
        dim, group = self.fixed("key", 3, "head_dim"), self.attributes["value_group"]
        sinks, recent = self.attributes["sink_tokens"], self.attributes["recent_tokens"]
        try:
            return CacheLayout(heads, dim, self._side("key", None), self._side("value", group or None), sinks, recent)
        except ValueError as error:
            raise ValueError(f"{self.node.plugin_id}: {error}") from error

    def _side(self, name: str, group: int | None) -> SideLayout:
        granularity: Granularity = "none"
        if f"{name}_scale" in self.tensors:
            several = self.fixed(f"{name}_scale", 1, f"the number of scales of {name}") > 1
            granularity = "per_head" if several else "per_tensor"
        elif f"{name}_scale_pool" in self.tensors:
            granularity = "per_group" if group else "per_token"
        return SideLayout(self.format(f"{name}_format"), granularity, group)

    @property
    def q_heads(self) -> int:
        """Query heads."""
        return self.fixed(self.node.inputs[0], 2 if self.node.operation == "append" else 1, "the number of heads")

    @property
    def scaling(self) -> float:
        """What scores are multiplied by."""
        return bits_float(self.attributes["scaling_bits"])

    @property
    def splits(self) -> int:
        """S; 0 where there are none."""
        if self.node.operation == "decode_partial":
            return partial_splits(self.layout, self.attributes["splits"])
        return self.fixed("partial_acc", 2, "the number of splits") if "partial_acc" in self.tensors else 0

    def check(self) -> None:
        """Raise ValueError for an input of another type or shape than the layout's."""
        layout, compute = self.layout, "fp32" if self.node.operation == "decode_reduce" else self.compute
        if self.q_heads % layout.kv_heads:
            raise ValueError(f"{self.node.plugin_id}: {self.q_heads} query heads are no multiple of {layout.kv_heads} KV heads")
        for name, least in (("splits", 1), ("sm", 80)):
            if self.attributes.get(name, least) < least:
                raise ValueError(f"{self.node.plugin_id}: {name} must be at least {least}, got {self.attributes[name]}")
        if "scaling_bits" in self.attributes and not MIN_NORMAL <= self.scaling < math.inf:
            raise ValueError(f"{self.node.plugin_id}: scaling_bits must be those of a float32 above 0, got {self.scaling}")
        sizes: dict[str, int] = {}
        for name, (dtype, dims) in input_specs(self.node, layout, compute, self.q_heads, self.splits).items():
            found, kind = self.dims(name), self.tensors[name].dtype.name
            if kind != dtype:
                packed = " (two codes to a byte)" if kind in ("INT4", "UINT8") else ""
                raise ValueError(f"{self.node.plugin_id}: {name} must be {dtype}{packed}, got {kind}")
            if not _fits(found, dims, sizes):
                shape = ", ".join("varies" if dim is None else str(dim) for dim in found)
                wanted = ", ".join(str(sizes.get(str(dim), dim)) for dim in dims)
                raise ValueError(f"{self.node.plugin_id}: {name} must be ({wanted}), got ({shape})")


def _fits(found: list[int | None], dims: tuple[int | str, ...], sizes: dict[str, int]) -> bool:
    """Whether a shape is as wanted. `sizes`: what the letters have stood for; those met here for the first time are added."""
    return len(found) == len(dims) and all(
        have == want if isinstance(want, int) else have is None or sizes.setdefault(want, have) == have
        for have, want in zip(found, dims, strict=True)
    )
