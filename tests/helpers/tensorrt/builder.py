"""The steps of TensorRT's builder for a quickly deployable plugin, in their order, on the stand-ins of stubs.

`build` and `declared` run in a separate process. Their arguments and results can be pickled, and errors raised by the
plugin or by NVIDIA's validation reach the test unchanged.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.tensorrt import stubs
from stages.engines.onnx.native.compiler import find_compiler

Triple = tuple[int, int, int]
"""Sizes at the smallest, the likely and the largest shapes."""


@dataclass(frozen=True)
class PluginInput:
    """An input: the name of its trt.DataType, and its dimensions, fixed or as triples."""

    dtype: str
    dims: tuple[int | Triple, ...]


@dataclass(frozen=True)
class PluginPart:
    """One plugin's part of an engine."""

    outputs: list[tuple[str, tuple[Triple, ...]]]
    types: list[str]
    """Data types of the inputs and outputs, as the plugin supports them; all formats are linear."""
    symbol: str
    ptx: str
    grid: tuple[Triple, Triple, Triple]
    block: tuple[Triple, Triple, Triple]
    shared_bytes: Triple
    extras: list[Triple]

    @property
    def parameters(self) -> list[str]:
        """PTX types of the entry's parameters."""
        entry = re.search(rf"\.visible \.entry {re.escape(self.symbol)}\((.*?)\)", self.ptx, re.DOTALL)
        assert entry is not None, f"no entry {self.symbol}"
        return re.findall(r"\.param \.(\w+)", entry[1])


Run = Callable[..., Any]


@contextmanager
def nvidia() -> Iterator[Run]:
    """Yield a function that runs functions of this module in a process with NVIDIA's package and returns their results."""
    if find_compiler() is None:
        pytest.skip("no C compiler, or no AVX2")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(prepare).result(timeout=120)
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result(timeout=120)


def prepare() -> None:
    """Load NVIDIA's package and declare the plugins."""
    stubs.load()
    import plugins.kv_attention.tensorrt_plugin  # noqa: F401


def build(plugin_id: str, tensors: Mapping[str, PluginInput], attributes: Mapping[str, int | float]) -> PluginPart:
    """Build one plugin for the given ordered inputs, as the ONNX parser adds it to a network."""
    import tensorrt as trt

    values = [_triples(tensor) for tensor in tensors.values()]
    types = [getattr(trt.DataType, tensor.dtype) for tensor in tensors.values()]
    plugin = _from_onnx(trt, plugin_id, attributes)

    output_types = plugin.get_output_data_types(types, [len(dims) for dims in values])
    shapes = [_dims(trt, dims) for dims in values]
    with stubs.expressions(trt) as expressions:
        output_shapes = plugin.get_output_shapes(shapes, [], expressions)
    assert len(output_shapes) == len(output_types) == plugin.get_num_outputs()
    outputs = [tuple(dim.values for dim in dims) for dims in output_shapes]
    assert [plugin.get_aliased_input(i) for i in range(len(outputs))] == [-1] * len(outputs)

    described = [_description(trt, *pair) for pair in zip([*types, *output_types], [*values, *outputs], strict=True)]
    inputs, described_outputs = described[: len(types)], described[len(types) :]
    supported = plugin.get_supported_format_combinations(described, len(types))
    assert [desc.format for desc in supported] == [trt.TensorFormat.LINEAR] * len(described)
    plugin.configure_plugin(inputs, described_outputs)
    assert plugin.get_valid_tactics() == []
    plugin.set_tactic(0)

    launch, extras = SimpleNamespace(), _Extras()
    with stubs.expressions(trt) as expressions:
        plugin.get_launch_params(shapes, described, len(types), launch, extras, expressions)
    symbol, ptx = plugin.get_kernel([desc.desc for desc in inputs], [desc.desc for desc in described_outputs])
    assert sorted(extras) == list(range(extras.nbSymExprs))
    assert all(extra.dtype == trt.PluginArgDataType.INT32 for extra in extras.values())
    size = {name: symbolic.expr.values for name, symbolic in vars(launch).items()}
    return PluginPart(
        outputs=[(kind.name, dims) for kind, dims in zip(output_types, outputs, strict=True)],
        types=[desc.type.name for desc in supported],
        symbol=symbol,
        ptx=ptx.decode(),
        grid=(size["grid_x"], size["grid_y"], size["grid_z"]),
        block=(size["block_x"], size["block_y"], size["block_z"]),
        shared_bytes=size["shared_mem"],
        extras=[extras[i].expr.values for i in range(len(extras))],
    )


def declared() -> dict[str, tuple[list[str], dict[str, type], list[str], int]]:
    """Return each operation's inputs, attributes, launch attributes and number of outputs, as NVIDIA's parser has read them."""
    from tensorrt_bindings.plugin import _lib

    return {
        name: (
            list(registered.input_tensor_names),
            dict(registered.input_attrs),
            list(registered.aot_impl_attr_names),
            registered.num_outputs,
        )
        for name, registered in _lib.QDP_REGISTRY.items()
    }


def _from_onnx(trt: Any, plugin_id: str, attributes: Mapping[str, int | float]) -> Any:
    """Create the plugin with the creator that is registered for a node's domain and operator.

    The node's attributes become the creator's fields. An attribute of type INT reaches the creator as an INT32.
    """
    namespace, name = plugin_id.split("::")
    creator = trt.get_plugin_registry().get_creator(name, "1", namespace)
    kinds = {int: (trt.PluginFieldType.INT32, np.int32), float: (trt.PluginFieldType.FLOAT32, np.float32)}
    field_values = {field.name: attributes[field.name] for field in creator.field_names if field.name in attributes}
    # A field points into its array, so the arrays must outlive the fields.
    values = {key: np.array([value], kinds[type(value)][1]) for key, value in field_values.items()}
    fields = trt.PluginFieldCollection(
        [trt.PluginField(key, values[key], kinds[type(field_values[key])][0]) for key in field_values]
    )
    request = trt.QuickPluginCreationRequest.STRICT_AOT
    return creator.create_plugin(name, namespace, fields, trt.TensorRTPhase.BUILD, request)


class _Extras(dict[int, Any]):
    """Stand-in for ISymExprs. A launch's parameters are a SimpleNamespace with seven expressions."""

    nbSymExprs = -1


def _triples(tensor: PluginInput) -> tuple[Triple, ...]:
    return tuple(dim if isinstance(dim, tuple) else (dim,) * 3 for dim in tensor.dims)


def _dims(trt: Any, values: tuple[Triple, ...]) -> Any:
    dims = trt.DimsExprs(len(values))
    for i, triple in enumerate(values):
        dims[i] = stubs.Dimension(triple, len(set(triple)) == 1)
    return dims


def _description(trt: Any, kind: Any, values: tuple[Triple, ...]) -> Any:
    """Return a DynamicPluginTensorDesc: -1 for variable dimensions, and the shapes of the profile."""
    tensor = trt.PluginTensorDesc()
    tensor.type, tensor.format = kind, trt.TensorFormat.LINEAR
    tensor.dims = trt.Dims([triple[0] if len(set(triple)) == 1 else -1 for triple in values])
    description = trt.DynamicPluginTensorDesc()
    description.desc = tensor
    description.min, description.opt, description.max = (trt.Dims([triple[i] for triple in values]) for i in range(3))
    return description
