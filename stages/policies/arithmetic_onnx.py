"""The formats' common arithmetic in ONNX operators: functions that write codes, and functions that read them.

Shapes: B sequences, H KV heads, S new tokens, P pages, T = P * 64 positions, D head_dim, W code elements per token, g scales
per token, n codes per element.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from stages.policies.spec import FLOAT16, MAX_FLOAT16, MIN_SCALE, ONNX_DOMAIN, PACKED, Element, Spec

OPSET = 21
"""Opset of function bodies and graphs. In earlier opsets QuantizeLinear and Cast do not support both float8 and float16."""

FLOAT_TYPES: dict[str, int] = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}
NUMPY_FLOATS: dict[str, type[np.floating[Any]]] = {"float32": np.float32, "float16": np.float16}
"""NumPy types for the results of `cache_arithmetic`."""


def cache_arithmetic(activations: str) -> str:
    """Return the type for writing and reading the cache of a decoder with activations of the given type.

    This is the type of the activations, or float32 if they are bfloat16. With its 8 bits of precision, bfloat16 would round
    x / scale before x / scale is rounded to a code.
    """
    return "float32" if activations == "bfloat16" else activations


class Body:
    """Builder of a function's body: methods append operators and return the names of their results.

    `nodes` are in execution order. `compute` is the type of the arithmetic.
    """

    def __init__(self, activations: str) -> None:
        self.compute = cache_arithmetic(activations)
        self._activations = activations
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def fresh(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Append an operator with one result and return the result's name."""
        out = out or self.fresh()
        self.nodes.append(helper.make_node(kind, list(inputs), [out], **attributes))
        return out

    def ops(self, kind: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Append an operator with `count` results and return their names."""
        outs = [self.fresh() for _ in range(count)]
        self.nodes.append(helper.make_node(kind, list(inputs), outs, **attributes))
        return outs

    def const(self, value: npt.ArrayLike, dtype: npt.DTypeLike) -> str:
        """Return a constant. Equal constants share a node."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self.fresh()
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
            self._constants[key] = name
        return self._constants[key]

    def real(self, value: npt.ArrayLike) -> str:
        return self.const(value, NUMPY_FLOATS[self.compute])

    def float32(self, value: float) -> str:
        return self.const(value, np.float32)

    def ints(self, value: int | Sequence[int]) -> str:
        """Return an int64 constant, for shapes and axes."""
        return self.const(value, np.int64)

    def concatenate(self, parts: Sequence[str]) -> str:
        """Concatenate along the last axis."""
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=-1)

    def reshape(self, x: str, *shape: int) -> str:
        """Append a Reshape. In `shape`, 0 keeps the input's dimension and -1 is inferred."""
        return self.op("Reshape", x, self.ints(list(shape)))

    def to_compute(self, x: str) -> str:
        return self.op("Cast", x, to=FLOAT_TYPES[self.compute])

    def from_activations(self, x: str) -> str:
        """Return a decoder activation in the compute dtype. Appends a Cast if the types differ."""
        return x if self._activations == self.compute else self.to_compute(x)

    def to_activations(self, x: str) -> str:
        """Return a result in the type of the decoder's activations. Appends a Cast if the types differ."""
        return x if self._activations == self.compute else self.op("Cast", x, to=FLOAT_TYPES[self._activations])

    def to_float32(self, x: str) -> str:
        """Append a Cast to float32, for numbers outside the range of float16."""
        return self.op("Cast", x, to=onnx.TensorProto.FLOAT)

    def function(self, name: str, layer: int, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.FunctionProto:
        """Return the body as the function kv.<name>_<layer>.

        Every layer has its own function with its own node names, because TensorRT names its layers after nodes and refuses two
        Quantize or Dequantize layers with equal names.
        """
        name = layer_function(name, layer)
        for number, node in enumerate(self.nodes):
            node.name = f"{name}.{number}"
        imports = [helper.make_opsetid("", OPSET)]
        return helper.make_function(ONNX_DOMAIN, name, list(inputs), list(outputs), self.nodes, imports)


def layer_function(name: str, layer: int) -> str:
    return f"{name}_{layer}"


Gather = Callable[[str, int], str]
"""Function (pool, width) that gathers pages of the pool (N, H, 64, width) and returns (B, H, T, width)."""


@dataclass(frozen=True)
class GraphOptions:
    """Options of a format in a policy, and the names of its inputs in the graph."""

    head_dim: int
    groups: int
    """Scales per token and head; 0 for static scales."""
    symmetric: bool
    static: bool
    """Whether all scales are fixed at build time."""
    scale: str
    zero: str


class Graph(ABC):
    """Base of the formats' arithmetics in ONNX operators."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @abstractmethod
    def write(self, body: Body, x: str, options: GraphOptions) -> list[str]:
        """Append nodes that quantize new tokens x (B, H, S, D); return codes (B, H, S, W), scales and zeros (B, H, S, g)."""

    @abstractmethod
    def codes(self, body: Body, pool: str, gather: Gather, options: GraphOptions) -> str:
        """Read codes from the pool as unscaled numbers (B, H, T, D) in the compute dtype."""

    def scales(self, body: Body, pool: str, gather: Gather, options: GraphOptions) -> str:  # noqa: ARG002
        return gather(pool, options.groups)


class ExactGraph(Graph):
    """Floating-point numbers without a scale."""

    def write(self, body: Body, x: str, options: GraphOptions) -> list[str]:  # noqa: ARG002
        return [body.op("Cast", x, to=onnx_type(self.spec.storage))]

    def codes(self, body: Body, pool: str, gather: Gather, options: GraphOptions) -> str:
        return body.to_compute(gather(pool, options.head_dim))


class ScaledGraph(Graph):
    """Codes with a scale, which is static or stored as float16."""

    @abstractmethod
    def encode(self, body: Body, steps: str, options: GraphOptions) -> str:
        """Round and pack numbers that are scaled and shifted by their zero: nearest code, ties to even, saturating."""

    def write(self, body: Body, x: str, options: GraphOptions) -> list[str]:
        if options.static:
            shifted = x if options.symmetric else body.op("Sub", x, body.to_compute(options.zero))
            return [self.encode(body, body.op("Div", shifted, body.to_compute(options.scale)), options)]
        if options.groups > 1:
            x = body.reshape(x, 0, 0, 0, options.groups, -1)
        zeros = []
        if options.symmetric:
            amax = body.op("ReduceMax", body.op("Abs", x), body.ints([-1]), keepdims=1)
            factor = body.op("Div", amax, body.real(self.spec.limit))
        else:
            high = body.op("ReduceMax", x, body.ints([-1]), keepdims=1)
            zeros = [_round_down_to_half(body, body.op("ReduceMin", x, body.ints([-1]), keepdims=1))]
            zero = body.to_compute(zeros[0])
            factor = body.op("Div", body.op("Sub", high, zero), body.real(self.spec.levels))
            x = body.op("Sub", x, zero)
        # The codes are computed from the rounded scale, because decoding uses the rounded scale.
        factor = body.op("Clip", factor, body.real(MIN_SCALE), body.real(MAX_FLOAT16))
        scale = body.op("Cast", factor, to=onnx_type(FLOAT16))
        stored = [body.op("Div", x, body.to_compute(scale)), scale, *zeros]
        if options.groups > 1:
            stored = [body.reshape(part, 0, 0, 0, -1) for part in stored]
        return [self.encode(body, stored[0], options), *stored[1:]]


class FloatGraph(ScaledGraph):
    """8-bit floating-point numbers."""

    def encode(self, body: Body, steps: str, options: GraphOptions) -> str:  # noqa: ARG002
        clipped = body.op("Clip", steps, body.real(-self.spec.limit), body.real(self.spec.limit))
        return body.op("QuantizeLinear", clipped, body.real(1.0), output_dtype=onnx_type(self.spec.storage))

    def codes(self, body: Body, pool: str, gather: Gather, options: GraphOptions) -> str:
        # Gather does not support float8, so the pool is converted first.
        return gather(body.op("DequantizeLinear", pool, body.real(1.0)), options.head_dim)


class IntegerGraph(ScaledGraph):
    """Packed integers, symmetric around 0 or from 0 to `levels` with a zero point."""

    def encode(self, body: Body, steps: str, options: GraphOptions) -> str:
        limit, levels = self.spec.limit, float(self.spec.levels)
        low, high = (-limit, limit) if options.symmetric else (0.0, levels)
        codes = body.op("Clip", body.op("Round", steps), body.real(low), body.real(high))
        return self.pack(body, codes, options)

    def pack(self, body: Body, codes: str, options: GraphOptions) -> str:
        """Pack codes (B, H, S, D) in the compute dtype into stored bytes."""
        offsets = self.offsets(symmetric=options.symmetric)
        weights = 2.0 ** (self.spec.bits * np.arange(len(offsets)))
        if len(weights) > 1:
            # All numbers are integers below 256, so the product is exact. A MatMul is one node instead of a chain of nodes.
            width = options.head_dim // len(weights)
            codes = body.op("MatMul", codes, body.real(np.kron(weights[:, None], np.eye(width))))
        offset = float(weights @ offsets)
        return body.op("Cast", body.op("Sub", codes, body.real(offset)) if offset else codes, to=onnx_type(PACKED))

    def offsets(self, *, symmetric: bool) -> list[float]:
        """Return code minus stored number for every number in a byte, from the lowest bits up."""
        half = 2.0 ** (self.spec.bits - 1)
        lowest = 0.0 if symmetric else half
        return [lowest - half] * (self.spec.packed - 1) + [lowest]

    def codes(self, body: Body, pool: str, gather: Gather, options: GraphOptions) -> str:
        offsets, step = self.offsets(symmetric=options.symmetric), 2.0**self.spec.bits
        stored = gather(pool, options.head_dim // len(offsets))
        # The floor is the byte's highest number, and `step` times the fraction is the rest. Both are exact even in float16.
        x = body.op("DequantizeLinear", stored, body.real(step ** (1 - len(offsets))))
        numbers: list[str] = []
        for _ in offsets[1:]:
            numbers.insert(0, body.op("Floor", x))
            x = body.op("Mul", body.op("Sub", x, numbers[0]), body.real(step))
        pairs = zip([x, *numbers], offsets, strict=True)
        return body.concatenate([body.op("Add", number, body.real(offset)) if offset else number for number, offset in pairs])


KINDS: dict[str, type[Graph]] = {"exact": ExactGraph, "float": FloatGraph, "integer": IntegerGraph}


def onnx_type(element: Element) -> int:
    kind: int = onnx.TensorProto.DataType.Value(element.onnx)
    return kind


def _round_down_to_half(body: Body, low: str) -> str:
    """Round `low` down to float16, by at most about two units in the last place, so that no code is below 0."""
    nearest = body.to_compute(body.op("Cast", low, to=onnx_type(FLOAT16)))
    unit = body.op("Add", body.op("Mul", body.op("Abs", nearest), body.real(2.0**-10)), body.real(2.0**-24))
    below = body.op("Where", body.op("Greater", nearest, low), body.op("Sub", nearest, unit), nearest)
    return body.op("Cast", body.op("Max", below, body.real(-MAX_FLOAT16)), to=onnx_type(FLOAT16))
