"""NVIDIA's Python plugin package (`tensorrt-cu13-bindings`) made importable where TensorRT's libraries are not installed.

The wheel's extension module links to three libraries of TensorRT and needs nine symbols of them, of which it calls none
while it is imported. `load` writes three shared objects that define those names and nothing else (no compiler is needed, and
a call crashes at once), and puts Python stand-ins where the package meets objects that only the libraries can make:
dimension expressions and the plugin registry. The declarations, their parsing and their validation are NVIDIA's.

To be called once, in a process of its own: it takes the name `tensorrt`, and TensorRT for RTX defines the same C++ types.
"""

import ctypes
import importlib
import importlib.metadata
import os
import platform
import struct
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

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
MACHINES = {"x86_64": 62, "aarch64": 183}
"""ELF's e_machine."""


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
    if sys.byteorder != "little" or platform.machine() not in MACHINES:
        raise RuntimeError(f"no stand-in for TensorRT's libraries on {platform.machine()}: add it to MACHINES")
    # Kernels are compiled in this process, not interpreted.
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as directory:
        for library in LIBRARIES:
            name = f"lib{library}.so.{_major()}"
            path = Path(directory, name)
            path.write_bytes(shared_object(name, SYMBOLS))
            # The extension module finds a library that is already loaded by its name.
            ctypes.CDLL(str(path))
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
        kinds.SUB: lambda a, b: a - b,
        kinds.PROD: lambda a, b: a * b,
        kinds.MAX: max,
        kinds.MIN: min,
        kinds.FLOOR_DIV: lambda a, b: a // b,
        kinds.CEIL_DIV: lambda a, b: -(-a // b),
        kinds.EQUAL: lambda a, b: int(a == b),
        kinds.LESS: lambda a, b: int(a < b),
    })  # fmt: skip


def _major() -> str:
    """Of TensorRT, as in the names of its libraries."""
    return importlib.metadata.version("tensorrt-cu13-bindings").split(".")[0]


def shared_object(name: str, symbols: tuple[str, ...]) -> bytes:
    """An ELF64 library `name` whose symbols point at its own header, which is data: nothing of it can be executed."""
    strings, offsets = b"\0", {}
    for text in (name, *symbols):
        offsets[text] = len(strings)
        strings += text.encode() + b"\0"
    head = 64 + 3 * 56
    # A global function in section 1: any but 0, which means undefined.
    table = bytes(24) + b"".join(struct.pack("<IBBHQQ", offsets[text], 0x12, 0, 1, 64, 0) for text in symbols)
    # One bucket: the chain goes through all symbols.
    count = len(symbols) + 1
    hashes = struct.pack(f"<{3 + count}I", 1, count, 1, 0, *range(2, count), 0)
    places = [head, head + len(table), head + len(table) + len(hashes)]
    end = places[2] + len(strings)
    dynamic_at = end + -end % 8
    # DT_SYMTAB, DT_HASH, DT_STRTAB, DT_STRSZ, DT_SYMENT, DT_SONAME, DT_NULL
    entries = [(6, places[0]), (4, places[1]), (5, places[2]), (10, len(strings)), (11, 24), (14, offsets[name]), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    size = dynamic_at + len(dynamic)

    def segment(kind: int, offset: int, length: int, align: int) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, 6, offset, offset, offset, length, length, align)

    # ET_DYN with PT_LOAD, PT_DYNAMIC and PT_GNU_STACK, all readable and writable: the loader writes into the dynamic part.
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, MACHINES[platform.machine()], 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0
    )
    segments = segment(1, 0, size, 0x10000) + segment(2, dynamic_at, len(dynamic), 8) + segment(0x6474E551, 0, 0, 16)
    return (header + segments + table + hashes + strings).ljust(dynamic_at, b"\0") + dynamic
