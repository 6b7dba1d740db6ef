"""NVIDIA's Python plugin package (`tensorrt-cu13-bindings`) made importable where TensorRT's libraries are not installed.

The wheel's extension module links to three libraries of TensorRT and needs nine symbols of them, of which it calls none
while it is imported. `load` compiles three libraries that define those names as numbers (a call crashes at once), and puts
Python stand-ins where the package meets objects that only the libraries can make: dimension expressions and the plugin
registry. The declarations, their parsing and their validation are NVIDIA's.

To be called once, in a process of its own: it takes the name `tensorrt`, and TensorRT for RTX defines the same C++ types.
"""

import ctypes
import importlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from stages.engines.onnx.native.compiler import find_compiler

LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
SYMBOLS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)


class Dimension:
    """Stands for IDimensionExpr: a value at the smallest, the likely and the largest shapes of a profile."""

    def __init__(self, values: tuple[int, int, int], constant: bool) -> None:
        self.values, self.constant = values, constant

    def is_constant(self) -> bool:
        return self.constant

    def get_constant_value(self) -> int:
        assert self.constant, "TensorRT gives the value of a constant only"
        return self.values[0]


class Expressions:
    """Stands for IExprBuilder, which is there for one call of the plugin only."""

    def __init__(self, operations: dict[Any, Callable[[int, int], int]]) -> None:
        self.operations, self.alive = operations, True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.alive = False

    def constant(self, value: int) -> Dimension:
        assert self.alive, "a builder of expressions is used after its call"
        return Dimension((value,) * 3, True)

    def operation(self, kind: Any, first: Dimension, second: Dimension) -> Dimension:
        assert self.alive, "a builder of expressions is used after its call"
        values = [self.operations[kind](a, b) for a, b in zip(first.values, second.values, strict=True)]
        return Dimension((values[0], values[1], values[2]), first.constant and second.constant)


class Dims(list[Any]):
    """Stands for DimsExprs."""

    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class Symbol:
    """Stands for ISymExpr, which keeps a dimension expression beside its type."""


class Registry:
    """Stands for IPluginRegistry."""

    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        key = (creator.name, creator.plugin_version, namespace)
        assert key not in self.creators, f"registered twice: {key}"
        self.creators[key] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators.get((name, version, namespace))


def load() -> types.ModuleType:
    """Make `tensorrt` and `tensorrt.plugin` importable and return the former."""
    # Kernels are compiled in this process, not interpreted.
    os.environ.pop("TRITON_INTERPRET", None)
    compiler = find_compiler()
    assert compiler is not None
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "symbols.c")
        source.write_text("".join(f"int {symbol};\n" for symbol in SYMBOLS), encoding="ascii")
        for library in LIBRARIES:
            name = f"lib{library}.so.{_major()}"
            built = [*compiler.command, "-shared", "-fPIC", f"-Wl,-soname,{name}", str(source), "-o", f"{directory}/{name}"]
            subprocess.run(built, check=True)
            # The extension module finds a library that is already loaded by its name.
            ctypes.CDLL(f"{directory}/{name}")
    bindings = importlib.import_module("tensorrt_bindings")
    trt = types.ModuleType("tensorrt")
    trt.__dict__.update({name: value for name, value in vars(bindings).items() if not name.startswith("_")})
    trt.__dict__.update(__version__=bindings.__version__, __path__=[])
    registry = Registry()
    stand_ins = {"IDimensionExpr": Dimension, "DimsExprs": Dims, "ISymExpr": Symbol}
    trt.__dict__.update(stand_ins, get_plugin_registry=lambda: registry)
    sys.modules["tensorrt"] = trt
    package = importlib.import_module("tensorrt_bindings.plugin")
    # What the `tensorrt` wheel shows of it.
    plugin = types.ModuleType("tensorrt.plugin")
    plugin.__dict__.update({name: getattr(package, name) for name in package.__all__})
    sys.modules["tensorrt.plugin"] = plugin
    trt.__dict__["plugin"] = plugin
    return trt


def expressions(trt: Any) -> Expressions:
    """A new builder of expressions with TensorRT's arithmetic."""
    kinds = trt.DimensionOperation
    return Expressions({
        kinds.SUM: lambda a, b: a + b,
        kinds.PROD: lambda a, b: a * b,
        kinds.FLOOR_DIV: lambda a, b: a // b,
    })  # fmt: skip


def _major() -> str:
    """Of TensorRT, as in the names of its libraries."""
    return importlib.metadata.version("tensorrt-cu13-bindings").split(".")[0]
