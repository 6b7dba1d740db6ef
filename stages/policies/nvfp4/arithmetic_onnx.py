"""NVFP4 in ONNX operators, computed in float32 because the layer's scale is too small for float16."""

import numpy as np
import onnx

from stages.policies.arithmetic_onnx import Body, Gather, Graph, GraphOptions, onnx_type
from stages.policies.table import NVFP4, NVFP4_MAGNITUDES, NVFP4_SCALES

_E2M1 = np.concatenate([NVFP4_MAGNITUDES, np.negative(NVFP4_MAGNITUDES)])
_BYTES = np.arange(-128, 128) % 256
E2M1_OF_BYTES = (_E2M1[_BYTES % 16], _E2M1[_BYTES // 16])
"""Values of the lower and the upper four bits of a byte, indexed by the signed byte plus 128."""


class Nvfp4BlocksGraph(Graph):
    """E2M1 codes in blocks of channels. The E4M3 block scale is in units of the layer scale; a block's maximum becomes 6."""

    def write(self, body: Body, x: str, options: GraphOptions) -> list[str]:
        blocks = body.reshape(body.to_float32(x), 0, 0, 0, options.groups, -1)
        amax = body.op("ReduceMax", body.op("Abs", blocks), body.ints([-1]), keepdims=1)
        low, high = (body.float32(bound) for bound in NVFP4_SCALES)
        one, stored_type = body.float32(1.0), onnx_type(self.spec.scale_storage)
        over = body.op("Mul", options.scale, body.float32(6.0))
        clipped = body.op("Clip", body.op("Div", amax, over), low, high)
        scale = body.op("DequantizeLinear", body.op("QuantizeLinear", clipped, one, output_dtype=stored_type), one)
        codes = _e2m1(body, body.op("Div", blocks, body.op("Mul", scale, options.scale)))
        codes = body.reshape(codes, 0, 0, 0, -1)
        first, second = body.ops("Split", 2, codes, axis=-1, num_outputs=2)
        byte = body.op("Add", first, body.op("Mul", second, body.float32(16.0)))
        signed = body.op("Sub", byte, body.float32(256.0))
        byte = body.op("Where", body.op("Less", byte, body.float32(128.0)), byte, signed)
        scales = body.op("QuantizeLinear", body.reshape(scale, 0, 0, 0, -1), one, output_dtype=stored_type)
        return [body.op("Cast", byte, to=onnx_type(self.spec.storage)), scales]

    def codes(self, body: Body, pool: str, gather: Gather, options: GraphOptions) -> str:
        codes = body.op("Cast", gather(pool, options.head_dim // 2), to=onnx.TensorProto.INT32)
        byte = body.op("Add", codes, body.const(128, np.int32))
        return body.concatenate([body.op("Gather", body.real(table), byte, axis=0) for table in E2M1_OF_BYTES])

    def scales(self, body: Body, pool: str, gather: Gather, options: GraphOptions) -> str:
        # The layer's scale is too small for float16, but its products with the block scales are not.
        wide = body.op("DequantizeLinear", pool, body.float32(1.0))
        return body.op("Mul", gather(wide, options.groups), options.scale)


def _e2m1(body: Body, steps: str) -> str:
    """Return the nearest codes 0 to 15 of scaled float32 numbers, ties to even codes."""
    magnitude = body.op("Min", body.op("Abs", steps), body.float32(6.0))
    small, medium = (body.op("Less", magnitude, body.float32(bound)) for bound in (2.0, 4.0))

    def by_size(*values: float) -> str:
        below_2, below_4, others = map(body.float32, values)
        return body.op("Where", small, below_2, body.op("Where", medium, below_4, others))

    whole = body.op("Round", body.op("Div", magnitude, by_size(0.5, 1.0, 2.0)))
    # Codes 0 to 4 have steps of 0.5 (up to 2), codes 4 to 6 steps of 1 (up to 4), and codes 6 and 7 a step of 2.
    codes = body.op("Add", whole, by_size(0.0, 2.0, 4.0))
    return body.op("Where", body.op("Less", steps, body.float32(0.0)), body.op("Add", codes, body.float32(8.0)), codes)


GRAPH = Nvfp4BlocksGraph(NVFP4)
