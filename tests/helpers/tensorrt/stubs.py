"""Make NVIDIA's Python plugin package (`tensorrt-cu13-bindings`) importable without TensorRT's libraries.

The wheel's extension module links to three TensorRT libraries and needs nine symbols, but calls none during import. `load`
compiles three libraries that define the symbols as integers (a call crashes at once). It adds Python stand-ins for the
objects that only the libraries can create: dimension expressions and the plugin registry. The declarations, their parsing
and their validation are NVIDIA's.

Call `load` once, in a separate process: it takes the name `tensorrt`, and TensorRT for RTX defines the same C++ types.
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
    """Stand-in for IDimensionExpr: a value at the smallest, the likely and the largest shapes of a profile."""

    def __init__(self, values: tuple[int, int, int], constant: bool) -> None:
        self.values, self.constant = values, constant

    def is_constant(self) -> bool:
        return self.constant

    def get_constant_value(self) -> int:
        assert self.constant, "only a constant dimension has a value during the build"
        return self.values[0]


class Expressions:
    """Stand-in for IExprBuilder, which is valid only during one call of the plugin."""

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
    """Stand-in for DimsExprs."""

    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class Symbol:
    """Stand-in for ISymExpr, which stores a dimension expression and its type."""


class Registry:
    """Stand-in for IPluginRegistry."""

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
            # The extension module looks libraries up by name, and finds those already loaded.
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
    # The part of the package that the `tensorrt` wheel exports.
    plugin = types.ModuleType("tensorrt.plugin")
    plugin.__dict__.update({name: getattr(package, name) for name in package.__all__})
    sys.modules["tensorrt.plugin"] = plugin
    trt.__dict__["plugin"] = plugin
    return trt


def expressions(trt: Any) -> Expressions:
    """Return a new expression builder with TensorRT's arithmetic."""
    kinds = trt.DimensionOperation
    return Expressions({
        kinds.SUM: lambda a, b: a + b,
        kinds.PROD: lambda a, b: a * b,
        kinds.FLOOR_DIV: lambda a, b: a // b,
    })  # fmt: skip


def _major() -> str:
    """Return TensorRT's major version, as in the names of its libraries."""
    return importlib.metadata.version("tensorrt-cu13-bindings").split(".")[0]
