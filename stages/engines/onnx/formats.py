"""What a cache format is in a graph: storage types, names and shapes of what is stored, and the nodes that write it.

With reading.py this is everything that depends on a format. Integer formats of any width come from pipeline.core.formats.CODES
alone; an exact or floating-point one needs its element type in STORAGE too. Shapes: B sequences, H KV heads, S new tokens,
D head_dim, W code elements of a token, g scales of a token. A scale is a dequantization factor: x ~ code * scale + zero.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx

from pipeline.core.formats import MAX_FLOAT16, MIN_SCALE, Format
from pipeline.core.kv import KVPolicy, KVScales, KVShape, SideName
from stages.engines.onnx.graph import Body


@dataclass(frozen=True)
class Storage:
    """Element type in the graph, and of the numpy array that holds the same bytes."""

    onnx_type: int
    numpy_type: npt.DTypeLike


FLOAT16 = Storage(onnx.TensorProto.FLOAT16, np.float16)
"""Of stored scales and zeros, and of the exact copies of sinks and recent tokens."""

STORAGE: dict[str, Storage] = {
    "fp16": FLOAT16,
    "bf16": Storage(onnx.TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    "fp8_e4m3": Storage(onnx.TensorProto.FLOAT8E4M3FN, np.uint8),
    "fp8_e5m2": Storage(onnx.TensorProto.FLOAT8E5M2, np.uint8),
}

PACKED = Storage(onnx.TensorProto.INT8, np.int8)
"""Integer codes, n = 8 / bits a byte, of which number j holds channel j * D / n + i of byte i: signed in the topmost bits,
plus half (2 ** (bits - 1)) in the lower ones. TensorRT takes no uint8."""


@dataclass(frozen=True)
class Side:
    """One stored copy of the keys or values of one layer. Names of inputs and arrays are here without their layer."""

    name: SideName
    form: Format
    kv_heads: int
    head_dim: int

    @property
    def arrays(self) -> dict[str, tuple[Storage, int]]:
        """Pools by input name: element type, and elements of one token of one KV head."""
        code, groups = self.form.code, self.form.scales_per_token(self.head_dim)
        storage = PACKED if code.kind == "integer" else STORAGE[self.form.dtype]
        width = self.form.code_bytes(self.head_dim) // np.dtype(storage.numpy_type).itemsize
        parameters = [] if not groups else ["scale"] if self.form.symmetric else ["scale", "zero"]
        return {f"{self.name}_pool": (storage, width)} | {f"{self.name}_{p}_pool": (FLOAT16, groups) for p in parameters}

    @property
    def constants(self) -> dict[str, tuple[int, int, int, int]]:
        """Static parameters by input name: shapes that broadcast against (B, H, S, D)."""
        if not self.form.static:
            return {}
        heads = 1 if self.form.granularity == "per_tensor" else self.kv_heads
        channels = self.head_dim if self.form.granularity == "per_channel" else 1
        parameters = ["scale"] if self.form.symmetric else ["scale", "zero"]
        return {f"{self.name}_{p}": (1, heads, 1, channels) for p in parameters}

    def parameters(self, scales: KVScales, layer: int) -> dict[str, npt.NDArray[np.float32]]:
        """The values of `constants`."""
        if not self.form.static:
            return {}
        found = scales.layers[layer][self.name]
        values = [found.scale] if found.zero is None else [found.scale, found.zero]
        shapes = zip(self.constants.items(), values, strict=True)
        return {name: np.array(value, np.float32).reshape(shape) for (name, shape), value in shapes}

    @property
    def fault_targets(self) -> list[str]:
        """What gives the codes their size: static parameters, stored ones, or the codes themselves where they are exact."""
        return [*self.constants] or [*self.arrays][1:] or [*self.arrays]

    @property
    def groups(self) -> int:
        """Stored scales of one token of one KV head, 0 without."""
        return self.form.scales_per_token(self.head_dim)

    def encode(self, body: Body, x: str) -> list[str]:
        """What is stored of new tokens x (B, H, S, D), in the order of `arrays`: (B, H, S, W) and (B, H, S, g)."""
        if self.form.exact:
            return [body.op("Cast", x, to=STORAGE[self.form.dtype].onnx_type)]
        x = self.rotated(body, x)
        if self.form.static:
            shifted = x if self.form.symmetric else body.op("Sub", x, body.to_compute(f"{self.name}_zero"))
            return [self._round(body, body.op("Div", shifted, body.to_compute(f"{self.name}_scale")))]
        if self.groups > 1:
            x = body.reshape(x, 0, 0, 0, self.groups, -1)
        zeros = []
        if self.form.symmetric:
            amax = body.op("ReduceMax", body.op("Abs", x), body.ints([-1]), keepdims=1)
            factor = body.op("Div", amax, body.real(self.form.code.limit))
        else:
            high = body.op("ReduceMax", x, body.ints([-1]), keepdims=1)
            zeros = [self._zero(body, body.op("ReduceMin", x, body.ints([-1]), keepdims=1))]
            zero = body.to_compute(zeros[0])
            factor = body.op("Div", body.op("Sub", high, zero), body.real(self.form.code.levels))
            x = body.op("Sub", x, zero)
        # Codes are made with the rounded scale that will be read back, not with the exact one.
        factor = body.op("Clip", factor, body.real(MIN_SCALE), body.real(MAX_FLOAT16))
        scale = body.op("Cast", factor, to=FLOAT16.onnx_type)
        stored = [body.op("Div", x, body.to_compute(scale)), scale, *zeros]
        if self.groups > 1:
            stored = [body.reshape(part, 0, 0, 0, -1) for part in stored]
        return [self._round(body, stored[0]), *stored[1:]]

    def _zero(self, body: Body, low: str) -> str:
        """The largest float16 that is not above `low`, up to one unit in the last place: no code is below 0."""
        nearest = body.to_compute(body.op("Cast", low, to=FLOAT16.onnx_type))
        unit = body.op("Add", body.op("Mul", body.op("Abs", nearest), body.real(2.0**-10)), body.real(2.0**-24))
        below = body.op("Where", body.op("Greater", nearest, low), body.op("Sub", nearest, unit), nearest)
        return body.op("Cast", body.op("Max", below, body.real(-MAX_FLOAT16)), to=FLOAT16.onnx_type)

    def _round(self, body: Body, x: str) -> str:
        """Round x (in units of the scale, from the zero) to the nearest code, ties to even, saturating; pack."""
        code = self.form.code
        low, high = (-code.limit, code.limit) if self.form.symmetric else (0.0, float(code.levels))
        if code.kind == "float":
            clipped = body.op("Clip", x, body.real(low), body.real(high))
            return body.op("QuantizeLinear", clipped, body.real(1.0), output_dtype=STORAGE[self.form.dtype].onnx_type)
        codes = body.op("Clip", body.op("Round", x), body.real(low), body.real(high))
        weights = 2.0 ** (code.bits * np.arange(len(self.packing)))
        if len(weights) > 1:
            # Whole numbers below 256, so that the product is exact; one node instead of a chain of them.
            width = self.head_dim // len(weights)
            codes = body.op("MatMul", codes, body.real(np.kron(weights[:, None], np.eye(width))))
        offset = float(weights @ self.packing)
        return body.op("Cast", body.op("Sub", codes, body.real(offset)) if offset else codes, to=PACKED.onnx_type)

    @property
    def packing(self) -> list[float]:
        """For each number of a byte, the lowest first: code - stored number."""
        bits = self.form.code.bits
        half = 2.0 ** (bits - 1)
        lowest = 0.0 if self.form.symmetric else half
        return [lowest - half] * (8 // bits - 1) + [lowest]

    def rotated(self, body: Body, x: str) -> str:
        """x (..., D) in the basis of the codes, or back: the matrix is its own inverse."""
        return x if self.form.rotation == "none" else body.op("MatMul", x, body.real(hadamard(self.head_dim)))


def layer_sides(policy: KVPolicy, shape: KVShape, layer: int) -> dict[SideName, Side]:
    """Every stored copy of one layer's keys and values."""
    return {name: Side(name, form, shape.kv_heads, shape.head_dim) for name, form in policy.sides(layer).items()}


def hadamard(size: int) -> npt.NDArray[np.float64]:
    """The orthonormal Hadamard matrix of a power of two, in Sylvester's order."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: npt.NDArray[np.float64] = matrix / np.sqrt(size)
    return scaled
