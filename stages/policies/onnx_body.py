"""A small builder of ONNX function bodies, whose methods append operators and return the names of the results."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

OPSET = 21
"""Opset of function bodies and graphs. In earlier opsets QuantizeLinear and Cast do not support both float8 and float16."""

DOMAIN = "kv"
"""Domain of the attention and quantize functions. A backend with its own kernel overrides a function by (domain, name)."""

FLOAT_TYPES: dict[str, int] = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}
NUMPY_FLOATS: dict[str, type[np.floating[Any]]] = {"float32": np.float32, "float16": np.float16}
"""NumPy types for the results of `cache_arithmetic`."""


def cache_arithmetic(activations: str) -> str:
    """Return the type for writing and reading the cache of a decoder with activations of the given type.

    This is the activations' type, except float32 for bfloat16, whose 8 bits of precision would round x / scale before the code.
    """
    return "float32" if activations == "bfloat16" else activations


class Body:
    """The nodes of a function in execution order. `compute` is the type of its arithmetic."""

    def __init__(self, activations: str) -> None:
        self.compute = cache_arithmetic(activations)
        self._activations = activations
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def fresh(self) -> str:
        """Return an unused name."""
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
        """Return a constant in the compute dtype."""
        return self.const(value, NUMPY_FLOATS[self.compute])

    def ints(self, value: int | Sequence[int]) -> str:
        """Return an int64 constant, for shapes and axes."""
        return self.const(value, np.int64)

    def reshape(self, x: str, *shape: int) -> str:
        """Append a Reshape. In `shape`, 0 keeps the input's dimension and -1 is inferred."""
        return self.op("Reshape", x, self.ints(list(shape)))

    def to_compute(self, x: str) -> str:
        """Append a Cast to the compute dtype."""
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
        return helper.make_function(DOMAIN, name, list(inputs), list(outputs), self.nodes, imports)


def layer_function(name: str, layer: int) -> str:
    """Return the name of a layer's function."""
    return f"{name}_{layer}"
