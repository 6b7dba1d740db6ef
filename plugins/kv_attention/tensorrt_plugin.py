"""TensorRT plugins, compiled ahead of time from the Triton kernels.

They compute a decode step's work list and attention, the attention of several new tokens, and join partial results.

Importing this module registers every operation of tensorrt_nodes with TensorRT (10.14 to 11.4) as a quickly deployable plugin,
for nodes of an ONNX graph (domain `kv`) and for networks made in Python:

    op = getattr(trt.plugin.op.kv, node.name)
    network.add_plugin(op(*tensors, **attributes), aot=True)

The built engine contains the PTX. It needs neither Python nor a plugin library to run.

Networks must be strongly typed. Heads, head_dim and exact slots are fixed; sequences, pages and exact buffers
may vary within a profile, since the kernels take them as integers or from the grid.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp

from plugins.kv_attention import aot
from plugins.kv_attention.tensorrt_nodes import ATTRIBUTES, DATA_TYPES, Call, Node, all_nodes, read_setting
from plugins.kv_attention.variants import context_splits, context_variant, partial_dtype, plan_grid, work_rows

POINTERS = {DATA_TYPES[dtype]: pointer for dtype, pointer in aot.POINTERS.items()}
"""Triton's pointer type for each trt.DataType. Kernels read float8 as bytes."""


def output_descriptors(call: Call) -> Any:
    """Return the descriptors of the outputs.

    TensorRT calls this twice: once for the types, with shapes that are not known yet, and once for the shapes.
    """
    tensors, setting, shape = call.tensors, call.setting, call.tensors[call.node.inputs[0]].shape_expr
    concrete = not shape[0].is_fake
    if concrete:
        call.check()

    def number(value: int) -> Any:
        # In TensorRT 10 a new constant belongs to the builder of the previous plugin call, which may no longer exist.
        return value if concrete else shape[0]

    dims: tuple[Any, ...]
    match call.node.operation:
        case "plan_work":
            rows = work_rows(number(call.programs), shape[0], exact=setting.layout.exact_tokens > 0)
            shapes = ((rows, number(5)), (shape[0], number(4)))
            return tuple(trtp.from_shape_expr(dims, trt.DataType.INT32) for dims in shapes)
        case "decode_partial":
            dims = (tensors["work"].shape_expr[0] + shape[0], shape[1], shape[3])
        case "context_partial":
            dims = (shape[0], shape[1], number(context_splits(call.programs)), shape[2], shape[3])
        case "decode_reduce":
            dims = (tensors["sequences"].shape_expr[0], number(1), shape[1], shape[2])
        case "context_reduce":
            dims = (shape[0], shape[1], shape[3], shape[4])
    if call.node.operation.endswith("reduce"):
        return trtp.from_shape_expr(dims, getattr(trt.DataType, DATA_TYPES[setting.dtype]))
    means = trtp.from_shape_expr(dims, getattr(trt.DataType, DATA_TYPES[partial_dtype(setting.dtype)]))
    return means, trtp.from_shape_expr((*dims[:-1], number(2)), trt.DataType.FLOAT)


def type_combinations(call: Call, outputs: Sequence[Any]) -> Any:
    """Return the only combination of types and formats: the types of the given tensors, all linear."""
    types = [tensor.dtype.name for tensor in (*call.tensors.values(), *outputs)]
    return [trtp.AutoTuneCombination(", ".join(types), "LINEAR")]


def kernel_launch(call: Call, outputs: Sequence[Any]) -> Any:
    """Return the kernel's symbol and PTX, its launch parameters, and its integer arguments."""
    kernel = aot.compile_operation(call.node.operation, call.setting)
    plugin_id = call.node.plugin_id
    extras = [name for name, kind in kernel.parameters if kind == "i32"]
    arguments = [
        *((_tensor_name(name), POINTERS[tensor.dtype.name]) for name, tensor in call.tensors.items()),
        *((name, "i32") for name in extras),
        *((_tensor_name(name), POINTERS[tensor.dtype.name]) for name, tensor in zip(call.node.outputs, outputs, strict=True)),
    ]
    parameters = [(_tensor_name(name), kind) for name, kind in kernel.parameters]
    if arguments != parameters:
        raise RuntimeError(f"{plugin_id} passes {arguments}, but the kernel takes {parameters}")
    if kernel.shared_bytes > aot.SHARED_LIMIT:
        raise RuntimeError(f"{plugin_id} needs {kernel.shared_bytes} bytes of shared memory; a launch has {aot.SHARED_LIMIT}")
    launch = trtp.KernelLaunchParams()
    launch.grid_x, launch.grid_y, launch.grid_z = launch_grid(call)
    launch.block_x = 32 * kernel.num_warps
    launch.shared_mem = kernel.shared_bytes
    integers = trtp.SymIntExprs(len(extras))
    for i, name in enumerate(extras):
        integers[i] = trtp.SymInt32(integer_argument(call, name))
    return kernel.name, kernel.ptx, launch, integers


def _tensor_name(name: str) -> str:
    """Return the name that a tensor and its kernel parameter share. Static, dynamic and block scales have the same name."""
    return name.removesuffix("_new").replace("_scale_pool", "_scale").replace("_block_scale", "_scale")


def integer_argument(call: Call, name: str) -> Any:
    """Return an integer argument of a kernel, as a symbolic expression of the shapes."""
    if name == "programs":
        return call.programs
    dimensions = {
        "batch": ("lengths", 0),
        "table_width": ("page_table", 1),
        "splits": ("partial_acc", 2),
        "tokens": ("query", 1),
    }
    return call.size(*dimensions[name])


def launch_grid(call: Call) -> tuple[Any, Any, Any]:
    """Return the grid of a call's kernel, in symbolic expressions of the shapes."""
    setting, size = call.setting, call.size
    heads = setting.layout.kv_heads
    match call.node.operation:
        case "plan_work":
            return plan_grid(call.programs), 1, 1
        case "decode_partial":
            return heads, size("work", 0), 1
        case "decode_reduce":
            return size("sequences", 0) * setting.q_heads, 1, 1
        case "context_partial":
            columns = context_variant(setting).constants["N"]
            blocks = (size("query", 1) * setting.group + (columns - 1)) // columns
            return _product(size("query", 0), blocks), heads, context_splits(call.programs)
        case "context_reduce":
            return _product(size("partial_acc", 0), size("partial_acc", 1)) * setting.q_heads, 1, 1


def _product(first: Any, second: Any) -> Any:
    """Return the product of two sizes, ints or symbolic expressions; an expression takes an int only on its right."""
    return second * first if isinstance(first, int) else first * second


def declare(node: Node) -> None:
    """Register one operation with TensorRT: its outputs, its types, and its kernel."""
    inputs = [_parameter(name, trtp.TensorDesc) for name in node.inputs]
    attributes = [_parameter(name, kind) for name, kind in ATTRIBUTES.items()]
    single, several = trtp.TensorDesc, tuple[(trtp.TensorDesc,) * len(node.outputs)]  # type: ignore[misc]
    outputs = _parameter("outputs", several)
    register_signature = inspect.Signature(
        [*inputs, *attributes], return_annotation=single if len(node.outputs) == 1 else several
    )
    autotune_signature = inspect.Signature([*inputs, *attributes, outputs], return_annotation=list[trtp.AutoTuneCombination])
    aot_signature = inspect.Signature(
        [*inputs, *attributes, outputs, _parameter("tactic", int)],
        return_annotation=tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs],
    )

    def call(signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[Call, Any]:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{node.plugin_id}: {error}") from error
        tensors, setting = {name: bound[name] for name in node.inputs}, read_setting(node, bound)
        return Call(node, tensors, setting, bound["programs"]), bound.get("outputs")

    def register(*args: Any, **kwargs: Any) -> Any:
        return output_descriptors(call(register_signature, args, kwargs)[0])

    def autotune(*args: Any, **kwargs: Any) -> Any:
        return type_combinations(*call(autotune_signature, args, kwargs))

    def aot_impl(*args: Any, **kwargs: Any) -> Any:
        return kernel_launch(*call(aot_signature, args, kwargs))

    for function, signature, decorator in (
        (register, register_signature, trtp.register),
        (autotune, autotune_signature, trtp.autotune),
        (aot_impl, aot_signature, trtp.aot_impl),
    ):
        # TensorRT reads the operation's tensors and attributes from the signature.
        function.__signature__ = signature  # type: ignore[attr-defined]
        decorator(node.plugin_id)(function)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


for _node in all_nodes():
    declare(_node)
