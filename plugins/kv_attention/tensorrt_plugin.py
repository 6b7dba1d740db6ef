"""kv::decode_partial, kv::decode_reduce and kv::append for TensorRT, compiled ahead of time from the Triton kernels.

Importing this module registers every operation of tensorrt_nodes with TensorRT (>= 10.14) as a quickly deployable plugin, for
nodes of an ONNX graph (domain `kv`) and for networks made in Python:

    op = getattr(trt.plugin.op.kv, node.name)
    network.add_plugin(op(*tensors, **attributes), aot=True)

The engine that is built holds the PTX: it needs neither Python nor a plugin library to run.

Networks must be strongly typed. Heads, head_dim, exact slots and splits are fixed; sequences, pages, exact buffers and layers
may vary within a profile, since the kernels take them as integers or from the grid.

The append writes in place. That needs PreviewFeature.ALIASED_PLUGIN_IO_10_03, and each output bound to its input's address.
It must run after every decode_partial of its step, which reads the exact slots that it overwrites. Where an engine cannot
promise that, launch the same kernel after it (plugins/kv_attention/launch.py): the page format is one.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

try:
    import tensorrt as trt
    import tensorrt.plugin as trtp
except ImportError as error:
    raise ImportError(
        f"the TensorRT plugin needs TensorRT >= 10.14 ({error}): on a machine with an NVIDIA GPU, "
        "pip install 'tensorrt-cu13>=10.14' (tensorrt-cu12 for CUDA 12)"
    ) from error

from plugins.kv_attention import aot
from plugins.kv_attention.kernels.variants import append_variant
from plugins.kv_attention.tensorrt_call import COMPUTE, Call
from plugins.kv_attention.tensorrt_nodes import DATA_TYPES, Node, all_nodes

MINIMUM = (10, 14)
"""Ahead-of-time plugins exist since 10.9; this is the first release whose Python package they were checked against."""

POINTERS = {"FLOAT": "*fp32", "HALF": "*fp16", "BF16": "*bf16", "FP8": "*u8", "INT8": "*i8", "INT32": "*i32"}
"""Triton's type of a tensor, by trt.DataType's name: kernels see float8 as bytes."""

if tuple(map(int, trt.__version__.split(".")[:2])) < MINIMUM:
    raise ImportError(f"the TensorRT plugin needs TensorRT >= {MINIMUM[0]}.{MINIMUM[1]}, found {trt.__version__}")


def describe(call: Call) -> Any:
    """What TensorRT must know of the outputs. It asks twice: for types, when shapes say nothing, and for shapes."""
    first = call.tensors[call.node.inputs[0]]
    batch, heads, _, dim = first.shape_expr if call.node.operation != "append" else (None,) * 4
    known = not first.shape_expr[0].is_fake
    if known:
        call.check()
    if call.node.operation == "append":
        return tuple(call.tensors[name].aliased() for name in call.node.outputs)

    def number(value: int) -> Any:
        # In TensorRT 10 a new constant belongs to the builder that the previous plugin was shown, which may be gone by now.
        return value if known else batch

    if call.node.operation == "decode_reduce":
        kind = DATA_TYPES[call.format("out_format")]
        return trtp.from_shape_expr((batch, number(1), heads, dim), getattr(trt.DataType, kind))
    exact = call.attributes["sink_tokens"] + call.attributes["recent_tokens"] > 0
    parts = number(call.attributes["splits"] + (1 if exact else 0))
    return tuple(trtp.from_shape_expr((batch, heads, parts, last), trt.DataType.FLOAT) for last in (dim, number(2)))


def combinations(call: Call, outputs: Sequence[Any]) -> Any:
    """The one choice there is: the types of the layout, all tensors linear."""
    types = [tensor.dtype.name for tensor in (*call.tensors.values(), *outputs)]
    return [trtp.AutoTuneCombination(", ".join(types), "LINEAR")]


def implement(call: Call, outputs: Sequence[Any]) -> Any:
    """The kernel's symbol and PTX, its launch, and its integer arguments."""
    kernel, grid = compile_for(call)
    plugin_id = call.node.plugin_id
    extras = [name for name, kind in kernel.parameters if kind == "i32"]
    passed = [
        *((_plain(name), POINTERS[tensor.dtype.name]) for name, tensor in call.tensors.items()),
        *((name, "i32") for name in extras),
        *((_plain(name), POINTERS[tensor.dtype.name]) for name, tensor in zip(call.node.outputs, outputs, strict=True)),
    ]
    taken = [(_plain(name), kind) for name, kind in kernel.parameters]
    if passed != taken:
        raise RuntimeError(f"{plugin_id} passes {passed} to a kernel that takes {taken}")
    if kernel.shared_bytes > aot.SHARED_LIMIT:
        raise RuntimeError(f"{plugin_id} needs {kernel.shared_bytes} bytes of shared memory; a launch has {aot.SHARED_LIMIT}")
    launch = trtp.KernelLaunchParams()
    launch.grid_x, launch.grid_y, launch.grid_z = grid
    launch.block_x = 32 * kernel.num_warps
    launch.shared_mem = kernel.shared_bytes
    arguments = trtp.SymIntExprs(len(extras))
    for i, name in enumerate(extras):
        arguments[i] = trtp.SymInt32(integer(call, name))
    return kernel.name, kernel.ptx, launch, arguments


def _plain(name: str) -> str:
    """What a tensor and a kernel's parameter for it are both called: kernels tell an input from the same pool as an output,
    and take scales of either kind."""
    return name.removesuffix("_in").removesuffix("_new").replace("_scale_pool", "_scale")


def integer(call: Call, name: str) -> Any:
    """An integer parameter of a kernel, as a symbolic expression of the shapes."""
    places = {
        "table_width": ("page_table", 1),
        "splits": ("partial_acc", 2),
        "pages": ("key_pool", 1),
        "buffers": ("key_exact", 1),
    }
    return call.size(*places[name])


def compile_for(call: Call) -> tuple[aot.CompiledKernel, tuple[Any, Any, Any]]:
    """The kernel, and its grid in symbolic expressions of the shapes."""
    layout, sm = call.layout, call.attributes["sm"]
    if call.node.operation == "decode_reduce":
        out = COMPUTE[call.format("out_format")]
        kernel = _reduce_kernel(layout, splits=call.splits, out_dtype=out, sm=sm)
        return kernel, (call.size("partial_acc", 0) * call.q_heads, 1, 1)
    if call.node.operation == "append":
        kernel = _append_kernel(layout, new_dtype=COMPUTE[call.compute], sm=sm)
        programs = -(-layout.kv_heads // append_variant(layout, sm=sm).constants["R"])
        return kernel, (programs, call.size("key", 1), call.size("key", 0))
    kernel = _decode_kernel(
        layout,
        group=call.q_heads // layout.kv_heads,
        query_dtype=COMPUTE[call.compute],
        scaling=call.scaling,
        sm=sm,
    )
    return kernel, (call.splits, layout.kv_heads, call.size("query", 0))


# Every layer of an engine uses the same few kernels.
_decode_kernel = cache(aot.compile_decode)
_reduce_kernel = cache(aot.compile_reduce)
_append_kernel = cache(aot.compile_append)


def declare(node: Node) -> None:
    """Register one operation with TensorRT."""
    inputs = [_parameter(name, trtp.TensorDesc) for name in node.inputs]
    attributes = [_parameter(name, int) for name in node.attributes]
    one, several = trtp.TensorDesc, tuple[(trtp.TensorDesc,) * len(node.outputs)]  # type: ignore[misc]
    outputs = _parameter("outputs", several)
    own = inspect.Signature([*inputs, *attributes], return_annotation=one if len(node.outputs) == 1 else several)
    tuned = inspect.Signature([*inputs, *attributes, outputs], return_annotation=list[trtp.AutoTuneCombination])
    compiled = inspect.Signature(
        [*inputs, *attributes, outputs, _parameter("tactic", int)],
        return_annotation=tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs],
    )

    def call(signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[Call, Any]:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{node.plugin_id}: {error}") from error
        found = Call(node, {name: given[name] for name in node.inputs}, {name: given[name] for name in node.attributes})
        return found, given.get("outputs")

    def register(*args: Any, **kwargs: Any) -> Any:
        return describe(call(own, args, kwargs)[0])

    def autotune(*args: Any, **kwargs: Any) -> Any:
        return combinations(*call(tuned, args, kwargs))

    def aot_impl(*args: Any, **kwargs: Any) -> Any:
        return implement(*call(compiled, args, kwargs))

    for function, signature, decorator in (
        (register, own, trtp.register),
        (autotune, tuned, trtp.autotune),
        (aot_impl, compiled, trtp.aot_impl),
    ):
        # What TensorRT reads; the operations differ in nothing else.
        function.__signature__ = signature  # type: ignore[attr-defined]
        decorator(node.plugin_id)(function)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


for _node in all_nodes():
    declare(_node)
