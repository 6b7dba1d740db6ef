"""Everything that depends on a cache format: storage types, and the nodes that write and read its codes.

A new format is a new entry here. Shapes: B sequences, H KV heads, R query rows of a KV head, T = P * 64 pool positions,
S new tokens, D head_dim, W code elements of a token, g scales of a token. A scale is a dequantization factor.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from pipeline.kv import BITS, CODE_MAX, PAGE_TOKENS, DType, Format
from stages.onnx.graph import Body

MIN_SCALE = 2.0**-14
"""Floor of a stored scale: the smallest normal float16, so that an all-zero token divides by something and the rounding
of the scale itself stays below half a step."""


@dataclass(frozen=True)
class Storage:
    """Element type of codes in the graph, and of the numpy array that holds their bytes."""

    onnx_type: int
    numpy_type: npt.DTypeLike


STORAGE: dict[DType, Storage] = {
    "fp16": Storage(onnx.TensorProto.FLOAT16, np.float16),
    "fp8_e4m3": Storage(onnx.TensorProto.FLOAT8E4M3FN, np.uint8),
    "int8": Storage(onnx.TensorProto.INT8, np.int8),
    "int4": Storage(onnx.TensorProto.INT8, np.int8),
}
"""INT4 is packed in int8 (TensorRT takes no uint8): byte = 16 * high + (low + 8), low = channel d, high = d + D/2."""

SCALE_STORAGE = Storage(onnx.TensorProto.FLOAT16, np.float16)


@dataclass(frozen=True)
class Stream:
    """Some channels of the stored codes, widened: code = gain * x + offset, x of shape (B, H, T, channels)."""

    x: str
    gain: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class Side:
    """Keys or values of one attention layer in one format."""

    form: Format
    kv_heads: int
    head_dim: int

    @property
    def storage(self) -> Storage:
        return STORAGE[self.form.dtype]

    @property
    def width(self) -> int:
        """Code elements of one token of one KV head."""
        return self.head_dim * BITS[self.form.dtype] // 8 // np.dtype(self.storage.numpy_type).itemsize

    @property
    def groups(self) -> int:
        """Stored scales of one token of one KV head, 0 without."""
        return self.form.scales_per_token(self.head_dim)

    def encode(self, body: Body, x: str, scale: str) -> tuple[str, str]:
        """Codes (B, H, S, W) and float16 scales (B, H, S, g) of new tokens x (B, H, S, D).

        `scale` names the static scale ("" when there is none); the returned scales are "" when none are stored.
        """
        if self.form.dtype == "fp16":
            return body.op("Cast", x, to=self.storage.onnx_type), ""
        if scale:
            return self._round(body, body.op("Div", x, body.to_compute(scale))), ""
        grouped = body.reshape(x, 0, 0, 0, self.groups, -1)
        amax = body.op("ReduceMax", body.op("Abs", grouped), body.ints([-1]), keepdims=1)
        factor = body.op("Div", amax, body.real(CODE_MAX[self.form.dtype]))
        # Codes are made with the rounded scale that will be read back, not with the exact one.
        stored = body.op("Cast", body.op("Max", factor, body.real(MIN_SCALE)), to=SCALE_STORAGE.onnx_type)
        scaled = body.op("Div", grouped, body.to_compute(stored))
        codes = self._round(body, body.reshape(scaled, 0, 0, 0, -1))
        return codes, body.reshape(stored, 0, 0, 0, -1)

    def _round(self, body: Body, x: str) -> str:
        """Round x (in units of the scale) to the nearest code, ties to even, saturating."""
        limit = CODE_MAX[self.form.dtype]
        if self.form.dtype == "fp8_e4m3":
            clipped = body.op("Clip", x, body.real(-limit), body.real(limit))
            return body.op("QuantizeLinear", clipped, body.real(1.0), output_dtype=self.storage.onnx_type)
        codes = body.op("Clip", body.op("Round", x), body.real(-limit), body.real(limit))
        if self.form.dtype == "int4":
            low, high = body.ops("Split", 2, codes, axis=-1, num_outputs=2)
            low = body.op("Add", low, body.real(8.0))
            codes = body.op("Add", low, body.op("Mul", high, body.real(16.0)))
        return body.op("Cast", codes, to=self.storage.onnx_type)

    def streams(self, body: Body, pool: str, index: str) -> list[Stream]:
        """The pages' codes, widened to the compute dtype but not scaled."""
        if self.form.dtype == "fp8_e4m3":
            # Gather is not defined on float8, so the bound part of the pool is widened before it.
            wide = body.op("DequantizeLinear", pool, body.real(1.0))
            return [Stream(gather_pages(body, wide, index, self.kv_heads, self.width))]
        codes = gather_pages(body, pool, index, self.kv_heads, self.width)
        if self.form.dtype != "int4":
            return [Stream(body.to_compute(codes))]
        # byte / 16 = high + (low + 8) / 16: floor and fraction, exact in float16 too.
        sixteenths = body.op("DequantizeLinear", codes, body.real(1 / 16))
        high = body.op("Floor", sixteenths)
        return [Stream(body.op("Sub", sixteenths, high), gain=16.0, offset=-8.0), Stream(high)]

    def scores(self, body: Body, q: str, pool: str, scale: str, index: str) -> str:
        """q . k for q (B, H, R, D) and every pool position: (B, H, R, T)."""
        if self.form.static:
            q = body.op("Mul", q, body.to_compute(scale))
        parts, rows = self._scaled(body, self.streams(body, pool, index), scale, index)
        pieces = [q] if len(parts) == 1 else body.ops("Split", len(parts), q, axis=-1, num_outputs=len(parts))
        total = ""
        for i, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
            gained = body.op("Mul", piece, body.real(part.gain)) if part.gain != 1 else piece
            product = body.op("MatMul", gained, body.op("Transpose", part.x, perm=[0, 1, 3, 2]))
            if part.offset:
                bias = body.op("ReduceSum", piece, body.ints([-1]), keepdims=1)
                product = body.op("Add", product, body.op("Mul", bias, body.real(part.offset)))
            if len(rows) > 1:
                product = body.op("Mul", product, rows[i])
            total = body.op("Add", total, product) if total else product
        return body.op("Mul", total, rows[0]) if len(rows) == 1 else total

    def mix(self, body: Body, p: str, pool: str, scale: str, index: str) -> str:
        """Sum of the values of every pool position weighted by p (B, H, R, T): (B, H, R, D)."""
        parts, rows = self._scaled(body, self.streams(body, pool, index), scale, index)
        weights = [body.op("Mul", p, row) for row in rows] or [p]
        outs = []
        for i, part in enumerate(parts):
            weight = weights[i if len(weights) > 1 else 0]
            out = body.op("MatMul", weight, part.x)
            if part.gain != 1:
                out = body.op("Mul", out, body.real(part.gain))
            if part.offset:
                mass = body.op("ReduceSum", weight, body.ints([-1]), keepdims=1)
                out = body.op("Add", out, body.op("Mul", mass, body.real(part.offset)))
            outs.append(out)
        joined = outs[0] if len(outs) == 1 else body.op("Concat", *outs, axis=-1)
        return body.op("Mul", joined, body.to_compute(scale)) if self.form.static else joined

    def _scaled(self, body: Body, parts: list[Stream], scale: str, index: str) -> tuple[list[Stream], list[str]]:
        """Parts, and the stored scales as rows (B, H, 1, T) to fold into scores or weights: none, one for all, or one a
        part. Scales that vary within a part can't be folded and are multiplied in."""
        if not self.groups:
            return parts, []
        scales = body.to_compute(gather_pages(body, scale, index, self.kv_heads, self.groups))
        if self.groups in (1, len(parts)):
            rows = body.op("Transpose", scales, perm=[0, 1, 3, 2])
            return parts, [rows] if self.groups == 1 else body.ops("Split", self.groups, rows, axis=2, num_outputs=self.groups)
        groups, pieces = self.groups, [scales]
        if len(parts) > 1:
            if groups % len(parts):
                # The middle group of an odd number lies in both halves of the channels: count every group as two.
                scales = body.op("Gather", scales, body.ints([i // 2 for i in range(2 * groups)]), axis=-1)
                groups *= 2
            pieces = body.ops("Split", len(parts), scales, axis=-1, num_outputs=len(parts))
        per_part = groups // len(parts)
        out = []
        for part, piece in zip(parts, pieces, strict=True):
            x = body.reshape(part.x, 0, 0, 0, per_part, -1)
            if part.gain != 1:
                x = body.op("Mul", x, body.real(part.gain))
            if part.offset:
                x = body.op("Add", x, body.real(part.offset))
            x = body.op("Mul", x, body.reshape(piece, 0, 0, 0, -1, 1))
            out.append(Stream(body.reshape(x, 0, 0, 0, -1)))
        return out, []


def gather_pages(body: Body, pool: str, index: str, kv_heads: int, width: int) -> str:
    """Pool (N, H, 64, width) and index (B, H, P) of (page, head) blocks -> (B, H, P * 64, width), without a transpose."""
    blocks = body.reshape(pool, -1, PAGE_TOKENS * width)
    return body.reshape(body.op("Gather", blocks, index, axis=0), 0, kv_heads, -1, width)
