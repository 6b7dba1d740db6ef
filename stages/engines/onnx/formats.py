"""The arithmetic of a cache format in a graph: the nodes that write codes. reading.py has those that read them.

Shapes: B sequences, H KV heads, S new tokens, D head_dim, W code elements of a token, g scales of a token. A scale is a
dequantization factor: x ~ code * scale + zero.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from pipeline.core.formats import (
    LARGEST_NVFP4_SCALE,
    MAX_FLOAT16,
    MIN_SCALE,
    SMALLEST_NVFP4_SCALE,
    SMALLEST_TURBOQUANT_SCALE,
)
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
        if self.form.in_blocks:
            return self._in_blocks(body, x)
        if self.form.arithmetic == "vllm_turboquant":
            return self._turboquant(body, x)
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

    def _in_blocks(self, body: Body, x: str) -> list[str]:
        """Write codes and block scales of NVFP4, in float32: the layer's scale is too small for float16."""
        layer_scale = f"{self.side}_scale"
        blocks = body.reshape(body.to_float32(x), 0, 0, 0, self.groups, -1)
        amax = body.op("ReduceMax", body.op("Abs", blocks), body.ints([-1]), keepdims=1)
        low, high = (body.const(bound, np.float32) for bound in (SMALLEST_NVFP4_SCALE, LARGEST_NVFP4_SCALE))
        one, stored_type = body.const(1.0, np.float32), onnx_type(self.scale_storage)

        def rounded(largest_code: float) -> tuple[str, str, str]:
            """Scales that make the largest magnitude this code, the codes 0 to 15, and each block's squared error."""
            over = body.op("Mul", layer_scale, body.const(largest_code, np.float32))
            wanted = body.op("Clip", body.op("Div", amax, over), low, high)
            scale = body.op("DequantizeLinear", body.op("QuantizeLinear", wanted, one, output_dtype=stored_type), one)
            step = body.op("Mul", scale, layer_scale)
            codes, values = self._e2m1(body, body.op("Div", blocks, step))
            off = body.op("Sub", body.op("Mul", values, step), blocks)
            return scale, codes, body.op("ReduceSum", body.op("Mul", off, off), body.ints([-1]), keepdims=1)

        scale, codes, error = rounded(6.0)
        if self.form.block_scale == "4over6":
            other_scale, other_codes, other_error = rounded(4.0)
            better = body.op("Less", other_error, error)
            scale, codes = (body.op("Where", better, *pair) for pair in ((other_scale, scale), (other_codes, codes)))
        codes = body.reshape(codes, 0, 0, 0, -1)
        first, second = body.ops("Split", 2, codes, axis=-1, num_outputs=2)
        byte = body.op("Add", first, body.op("Mul", second, body.const(16.0, np.float32)))
        signed = body.op("Sub", byte, body.const(256.0, np.float32))
        byte = body.op("Where", body.op("Less", byte, body.const(128.0, np.float32)), byte, signed)
        scales = body.op("QuantizeLinear", body.reshape(scale, 0, 0, 0, -1), one, output_dtype=stored_type)
        return [body.op("Cast", byte, to=onnx_type(STORAGE["nvfp4"])), scales]

    def _turboquant(self, body: Body, x: str) -> list[str]:
        """Write codes, scales and zeros of vLLM's turboquant values, in float32: codes are of the unrounded scale and zero."""

        def real(value: float) -> str:
            return body.const(value, np.float32)

        x = body.to_float32(x)
        low, high = (body.op(end, x, body.ints([-1]), keepdims=1) for end in ("ReduceMin", "ReduceMax"))
        scale = body.op("Div", body.op("Sub", high, low), real(self.form.code.levels))
        scale = body.op("Max", scale, real(SMALLEST_TURBOQUANT_SCALE))
        steps = body.op("Add", body.op("Div", body.op("Sub", x, low), scale), real(0.5))
        codes = body.op("Clip", body.op("Floor", steps), real(0.0), real(self.form.code.levels))
        stored = [body.op("Cast", part, to=onnx_type(FLOAT16)) for part in (scale, low)]
        return [self._packed(body, body.to_compute(codes)), *stored]

    def _e2m1(self, body: Body, steps: str) -> tuple[str, str]:
        """The nearest codes 0 to 15 of float32 numbers in units of their scale, ties to even codes, and what they stand for."""

        def real(value: float) -> str:
            return body.const(value, np.float32)

        magnitude = body.op("Min", body.op("Abs", steps), real(6.0))
        small, medium = (body.op("Less", magnitude, real(bound)) for bound in (2.0, 4.0))

        def by_size(*values: float) -> str:
            return body.op("Where", small, real(values[0]), body.op("Where", medium, real(values[1]), real(values[2])))

        unit = by_size(0.5, 1.0, 2.0)
        whole = body.op("Round", body.op("Div", magnitude, unit))
        negative = body.op("Less", steps, real(0.0))
        # Codes 0 to 4 are halves, 4 to 6 ones above 2, and 6 and 7 twos above 4.
        codes = body.op("Add", whole, by_size(0.0, 2.0, 4.0))
        codes = body.op("Where", negative, body.op("Add", codes, real(8.0)), codes)
        value = body.op("Mul", whole, unit)
        return codes, body.op("Where", negative, body.op("Neg", value), value)

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
        return self._packed(body, body.op("Clip", body.op("Round", x), body.real(low), body.real(high)))

    def _packed(self, body: Body, codes: str) -> str:
        """Pack codes (B, H, S, D) of an integer type, in the compute dtype, as they are stored."""
        weights = 2.0 ** (self.form.code.bits * np.arange(len(self.packing)))
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
