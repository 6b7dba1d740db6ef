"""turboquant_k8v4 in ONNX operators, in float32: codes are computed from the unrounded scale and zero point."""

from stages.policies.arithmetic_onnx import Body, GraphOptions, IntegerGraph, onnx_type
from stages.policies.spec import FLOAT16
from stages.policies.table import TURBOQUANT_SMALLEST_SCALE, VLLM_TURBOQUANT


class TurboquantGraph(IntegerGraph):
    """INT4 codes between the minimum and the maximum of a token and head."""

    def write(self, body: Body, x: str, options: GraphOptions) -> list[str]:
        x = body.to_float32(x)
        low, high = (body.op(end, x, body.ints([-1]), keepdims=1) for end in ("ReduceMin", "ReduceMax"))
        scale = body.op("Div", body.op("Sub", high, low), body.float32(self.spec.levels))
        scale = body.op("Max", scale, body.float32(TURBOQUANT_SMALLEST_SCALE))
        steps = body.op("Add", body.op("Div", body.op("Sub", x, low), scale), body.float32(0.5))
        codes = body.op("Clip", body.op("Floor", steps), body.float32(0.0), body.float32(self.spec.levels))
        stored = [body.op("Cast", part, to=onnx_type(FLOAT16)) for part in (scale, low)]
        return [self.pack(body, body.to_compute(codes), options), *stored]


GRAPH = TurboquantGraph(VLLM_TURBOQUANT)
