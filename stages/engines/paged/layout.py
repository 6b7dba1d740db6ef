"""The arrays of a side of the cache: names, element types and widths, and the shapes of its static parameters.

Integer formats of any width come from pipeline.core.formats.CODES alone; an exact or floating-point one needs its element
type in STORAGE too. Shapes: H KV heads, D head_dim, W code elements of a token, g scales of a token.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy, KVShape, Side
from pipeline.core.scales import KVScales


@dataclass(frozen=True)
class Storage:
    """The element type of an array."""

    name: str
    """ONNX's name of it."""
    numpy_type: npt.DTypeLike
    """The type of a numpy array of the same bytes."""


FLOAT16 = Storage("FLOAT16", np.float16)
"""The type of stored scales and zeros, but those of NVFP4, and of the exact copies of sinks and recent tokens."""

PACKED = Storage("INT8", np.int8)
"""Storage of integer codes, n = 8 / bits of them in a byte: number j of byte i, from the lowest bits up, is the code of
channel j * D / n + i. The topmost number is signed; the others are stored plus half their range, 2 ** (bits - 1). The type
is int8 because TensorRT takes no uint8."""

STORAGE: dict[str, Storage] = {
    "fp16": FLOAT16,
    "bf16": Storage("BFLOAT16", ml_dtypes.bfloat16),
    "fp8_e4m3": Storage("FLOAT8E4M3FN", np.uint8),
    "fp8_e5m2": Storage("FLOAT8E5M2", np.uint8),
    "nvfp4": PACKED,
}
"""Of codes that are no integers. Byte i of NVFP4 holds the codes of channel i, in its lower four bits, and of D / 2 + i."""


@dataclass(frozen=True)
class StoredSide:
    """The arrays and static parameters of one side of one layer. Their names are here without the layer."""

    side: Side
    form: Format
    kv_heads: int
    head_dim: int

    @property
    def arrays(self) -> dict[str, tuple[Storage, int]]:
        """Pools by the graph's input: element type, and elements of one token of one KV head (W or g)."""
        code, groups = self.form.code, self.groups
        storage = PACKED if code.kind == "integer" else STORAGE[self.form.dtype]
        width = self.form.code_bytes(self.head_dim) // np.dtype(storage.numpy_type).itemsize
        parameters = self._parameters if groups else ()
        return {f"{self.side}_pool": (storage, width)} | {
            f"{self.side}_{p}_pool": (self.scale_storage, groups) for p in parameters
        }

    @property
    def constants(self) -> dict[str, tuple[int, int, int, int]]:
        """Static parameters by the graph's input: shapes that broadcast against (B, H, S, D)."""
        count = self.form.static_scales(self.kv_heads, self.head_dim)
        if not count:
            return {}
        heads = 1 if count == 1 else self.kv_heads
        channels = self.head_dim if self.form.granularity == "per_channel" else 1
        return {f"{self.side}_{p}": (1, heads, 1, channels) for p in self._parameters}

    def constant_values(self, scales: KVScales, layer: int) -> dict[str, npt.NDArray[np.float32]]:
        """Return the values of `constants` in one layer."""
        if not self.form.has_static_scales:
            return {}
        static = scales.layers[layer][self.side]
        values = [static.scale] if static.zero is None else [static.scale, static.zero]
        shapes = zip(self.constants.items(), values, strict=True)
        return {name: np.array(value, np.float32).reshape(shape) for (name, shape), value in shapes}

    @property
    def fault_targets(self) -> list[str]:
        """Arrays that the canary multiplies: static parameters, else stored scales and zeros, else the exact values."""
        return [*self.constants] or [*self.arrays][1:] or [*self.arrays]

    @property
    def groups(self) -> int:
        """Stored scales of one token of one KV head, 0 without."""
        return self.form.scales_per_token(self.head_dim)

    @property
    def scale_storage(self) -> Storage:
        """The element type of stored scales and zeros."""
        return STORAGE["fp8_e4m3"] if self.form.in_blocks else FLOAT16

    @property
    def _parameters(self) -> tuple[str, ...]:
        return ("scale",) if self.form.symmetric else ("scale", "zero")


def layer_sides(policy: KVPolicy, shape: KVShape, layer: int) -> dict[Side, StoredSide]:
    """Return every stored copy of one layer's keys and values."""
    return {side: StoredSide(side, form, shape.kv_heads, shape.head_dim) for side, form in policy.sides(layer).items()}
