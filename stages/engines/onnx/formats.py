"""The arithmetic of a cache format in a graph: the nodes that write codes. reading.py has those that read them.

Shapes: B sequences, H KV heads, S new tokens, D head_dim, W code elements of a token, g scales of a token. A scale is a
dequantization factor: x ~ code * scale + zero.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from pipeline.core.formats import MAX_FLOAT16, MIN_SCALE
from pipeline.core.kv import KVPolicy, KVShape, Side
from stages.engines.onnx.graph import Body
from stages.engines.paged.layout import FLOAT16, PACKED, STORAGE, Storage, StoredSide


@dataclass(frozen=True)
class SideCodec(StoredSide):
    """Writes the codes of one side of one layer."""

    def encode(self, body: Body, x: str) -> list[str]:
        """Write the nodes that quantize new tokens x (B, H, S, D).

        Returns:
            The results in the order of `arrays`: codes (B, H, S, W), scales and zeros (B, H, S, g).
        """
        if self.form.exact:
            return [body.op("Cast", x, to=onnx_type(STORAGE[self.form.dtype]))]
        x = self.rotated(body, x)
        if self.form.static:
            shifted = x if self.form.symmetric else body.op("Sub", x, body.to_compute(f"{self.side}_zero"))
            return [self._round(body, body.op("Div", shifted, body.to_compute(f"{self.side}_scale")))]
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
        # The codes belong to the rounded scale, which is read back, not to the exact one.
        factor = body.op("Clip", factor, body.real(MIN_SCALE), body.real(MAX_FLOAT16))
        scale = body.op("Cast", factor, to=onnx_type(FLOAT16))
        stored = [body.op("Div", x, body.to_compute(scale)), scale, *zeros]
        if self.groups > 1:
            stored = [body.reshape(part, 0, 0, 0, -1) for part in stored]
        return [self._round(body, stored[0]), *stored[1:]]

    def _zero(self, body: Body, low: str) -> str:
        """Round `low` down to a float16, at most about two units in the last place below, so that no code is below 0."""
        nearest = body.to_compute(body.op("Cast", low, to=onnx_type(FLOAT16)))
        unit = body.op("Add", body.op("Mul", body.op("Abs", nearest), body.real(2.0**-10)), body.real(2.0**-24))
        below = body.op("Where", body.op("Greater", nearest, low), body.op("Sub", nearest, unit), nearest)
        return body.op("Cast", body.op("Max", below, body.real(-MAX_FLOAT16)), to=onnx_type(FLOAT16))

    def _round(self, body: Body, x: str) -> str:
        """Round x (in units of the scale, from the zero) to the nearest code, ties to even, saturating; pack."""
        code = self.form.code
        low, high = (-code.limit, code.limit) if self.form.symmetric else (0.0, float(code.levels))
        if code.kind == "float":
            clipped = body.op("Clip", x, body.real(low), body.real(high))
            return body.op("QuantizeLinear", clipped, body.real(1.0), output_dtype=onnx_type(STORAGE[self.form.dtype]))
        codes = body.op("Clip", body.op("Round", x), body.real(low), body.real(high))
        weights = 2.0 ** (code.bits * np.arange(len(self.packing)))
        if len(weights) > 1:
            # Whole numbers below 256, so that the product is exact; one node instead of a chain of them.
            width = self.head_dim // len(weights)
            codes = body.op("MatMul", codes, body.real(np.kron(weights[:, None], np.eye(width))))
        offset = float(weights @ self.packing)
        return body.op("Cast", body.op("Sub", codes, body.real(offset)) if offset else codes, to=onnx_type(PACKED))

    @property
    def packing(self) -> list[float]:
        """For each number of a byte, from the lowest bits up: its code minus the number that is stored."""
        bits = self.form.code.bits
        half = 2.0 ** (bits - 1)
        lowest = 0.0 if self.form.symmetric else half
        return [lowest - half] * (8 // bits - 1) + [lowest]

    def rotated(self, body: Body, x: str) -> str:
        """Rotate x (..., D) into the basis of the codes, or back: the matrix is its own inverse."""
        return x if self.form.rotation == "none" else body.op("MatMul", x, body.real(hadamard(self.head_dim)))


def layer_codecs(policy: KVPolicy, shape: KVShape, layer: int) -> dict[Side, SideCodec]:
    """Return the codec of every stored copy of one layer's keys and values."""
    return {side: SideCodec(side, form, shape.kv_heads, shape.head_dim) for side, form in policy.sides(layer).items()}


def onnx_type(storage: Storage) -> int:
    """Return ONNX's number of an element type."""
    kind: int = onnx.TensorProto.DataType.Value(storage.name)
    return kind


def hadamard(size: int) -> npt.NDArray[np.float64]:
    """Return the orthonormal Hadamard matrix of a power of two, in Sylvester's order."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: npt.NDArray[np.float64] = matrix / np.sqrt(size)
    return scaled
