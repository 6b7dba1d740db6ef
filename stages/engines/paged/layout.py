"""The arrays of one side of the cache: names, element types, widths, and shapes of the static parameters.

Shapes: H KV heads, D head_dim, W code elements of a token, g scales of a token.
"""

from dataclasses import dataclass
from typing import Self

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
import numpy.typing as npt

from stages.policies.formats import Format
from stages.policies.policy import KVPolicy, KVShape, Side
from stages.policies.scales import KVScales
from stages.policies.spec import Element


@dataclass(frozen=True)
class StoredSide:
    """The arrays and static parameters of one side of one layer. Names do not include the layer."""

    side: Side
    form: Format
    kv_heads: int
    head_dim: int

    @classmethod
    def of_layer(cls, policy: KVPolicy, shape: KVShape, layer: int) -> dict[Side, Self]:
        return {side: cls(side, form, shape.kv_heads, shape.head_dim) for side, form in policy.sides(layer).items()}

    @property
    def arrays(self) -> dict[str, tuple[Element, int]]:
        """Pools by the name of the graph's input: (element type, elements W or g per token and KV head)."""
        code, groups = self.form.code, self.groups
        arrays = {f"{self.side}_pool": (code.storage, self.form.code_bytes(self.head_dim) // code.storage.bytes)}
        if groups:
            arrays[f"{self.side}_scale_pool"] = (code.scale_storage, groups)
            if not self.form.symmetric and code.zero_storage is not None:
                arrays[f"{self.side}_zero_pool"] = (code.zero_storage, groups)
        return arrays

    @property
    def constants(self) -> dict[str, tuple[int, int, int, int]]:
        """Shapes of the static parameters by the name of the graph's input; they broadcast against (B, H, S, D)."""
        count = self.form.static_scales(self.kv_heads, self.head_dim)
        if not count:
            return {}
        heads = 1 if count == 1 else self.kv_heads
        channels = self.head_dim if self.form.static_granularity == "per_channel" else 1
        parameters = ("scale",) if self.form.symmetric else ("scale", "zero")
        return {f"{self.side}_{parameter}": (1, heads, 1, channels) for parameter in parameters}

    def constant_values(self, scales: KVScales, layer: int) -> dict[str, npt.NDArray[np.float32]]:
        if not self.form.has_static_scales:
            return {}
        static = scales.layers[layer][self.side]
        values = [static.scale] if static.zero is None else [static.scale, static.zero]
        shapes = zip(self.constants.items(), values, strict=True)
        return {name: np.array(value, np.float32).reshape(shape) for (name, shape), value in shapes}

    @property
    def fault_targets(self) -> list[str]:
        """Arrays that the must-fail control multiplies: static parameters, else stored scales and zeros, else exact values."""
        return [*self.constants] or [*self.arrays][1:] or [*self.arrays]

    @property
    def groups(self) -> int:
        """Number of stored scales per token and KV head; 0 if scales are static or absent."""
        return self.form.scales_per_token(self.head_dim)
