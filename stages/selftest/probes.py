"""Two small TensorRT networks of one plugin each, for the self-test's checks of shared memory and of writing in place.

Both are built in Python with ahead-of-time plugins only. They need TensorRT and a GPU.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plugins.kv_attention import reference
from plugins.kv_attention.layout import CacheLayout
from plugins.kv_attention.tensorrt_nodes import cache_attributes, input_specs, node_of
from stages.engines.tensorrt.library import Library
from stages.engines.tensorrt.session import DTYPES

THREADS = 32

FAR_SHARED = """.version 8.1
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 room[];
.visible .entry far_shared(.param .u64 x, .param .u32 last, .param .u64 y)
.reqntid 32
{
  .reg .b64 %rd<5>;
  .reg .b32 %r<6>;
  .reg .f32 %f<3>;
  ld.param.u64 %rd1, [x];
  cvta.to.global.u64 %rd1, %rd1;
  ld.param.u32 %r1, [last];
  ld.param.u64 %rd2, [y];
  cvta.to.global.u64 %rd2, %rd2;
  mov.u32 %r2, %tid.x;
  mul.wide.u32 %rd3, %r2, 4;
  add.s64 %rd1, %rd1, %rd3;
  ld.global.f32 %f1, [%rd1];
  mov.u32 %r3, room;
  add.s32 %r3, %r3, %r1;
  shl.b32 %r4, %r2, 2;
  add.s32 %r3, %r3, %r4;
  st.shared.f32 [%r3], %f1;
  bar.sync 0;
  ld.shared.f32 %f2, [%r3];
  add.s64 %rd2, %rd2, %rd3;
  st.global.f32 [%rd2], %f2;
  ret;
}
"""
"""A kernel that copies 32 numbers by way of shared memory, `last` bytes from its beginning."""


def far_shared_memory(library: Library, size: int) -> npt.NDArray[np.float32]:
    """Copy 1 .. 32 through the last 128 of `size` bytes of shared memory; return the 32 values that arrive."""
    trt = library.trt
    declare_far_shared(library, size)
    builder, network = _network(library)
    x = network.add_input("x", trt.DataType.FLOAT, (THREADS,))
    layer = network.add_plugin(trt.plugin.op.kvgate_check.far_shared(x), aot=True)
    _mark(network, layer.get_output(0), "y")
    x_device = torch.arange(1, THREADS + 1, dtype=torch.float32, device="cuda")
    y_device = torch.zeros_like(x_device)
    _run(library, builder, network, {"x": x_device, "y": y_device})
    values: npt.NDArray[np.float32] = y_device.cpu().numpy()
    return values


def append_in_place(
    library: Library, layout: CacheLayout, sm: int
) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, npt.NDArray[np.generic]]]:
    """Append two tokens with the plugin, each array bound to one address as input and as output, and with the reference.

    TensorRT is told nothing of that, as in the plans.

    Args:
        library: TensorRT.
        layout: The cache's arrays.
        sm: Compute capability of the GPU, 89 for 8.9.

    Returns:
        The cache's arrays by name, as the plugin wrote them and as the reference did.
    """
    trt, node = library.trt, node_of("append", layout)
    sizes = {"L": 1, "T": 2, "N": 4, "P": 2, "M": 2, "A": 2, "X": 1, "Q": 1}
    specs = input_specs(node, layout, "fp16", layout.kv_heads)
    torch.manual_seed(0)
    host = {
        name: torch.zeros([sizes[d] if isinstance(d, str) else d for d in dims], dtype=DTYPES[dtype])
        for name, (dtype, dims) in specs.items()
    }
    for name in ("key", "value"):
        host[name].normal_()
        if f"{name}_scale" in host:
            host[f"{name}_scale"].fill_(0.01)
    host["page_table"].copy_(torch.tensor([[0, 1], [2, 3]]))
    host["lengths"].copy_(torch.tensor([5, 70]))
    if "exact_slots" in host:
        host["exact_slots"].copy_(torch.tensor([1, 0]))
    device = {name: tensor.cuda() for name, tensor in host.items()}

    builder, network = _network(library)
    inputs = [network.add_input(name, getattr(trt.DataType, specs[name][0]), tuple(host[name].shape)) for name in node.inputs]
    operation = getattr(trt.plugin.op.kv, node.name)(*inputs, **cache_attributes(layout, sm))
    layer = network.add_plugin(operation, aot=True)
    for position, name in enumerate(node.outputs):
        _mark(network, layer.get_output(position), f"out_{name}")
    _run(library, builder, network, device | {f"out_{name}": device[name] for name in node.outputs})

    fp8 = {name for name in node.outputs if specs[name][0] == "FP8"}
    cache = {name: host[name].view(torch.float8_e4m3fn) if name in fp8 else host[name] for name in host}
    reference.append(
        layout,
        host["key"][0],
        host["value"][0],
        {name: tensor[0] for name, tensor in cache.items() if name not in ("page_table", "lengths", "exact_slots", "attended")},
        page_table=host["page_table"],
        lengths=host["lengths"],
        exact_slots=host.get("exact_slots"),
    )
    written = {name: device[name].cpu().numpy() for name in node.outputs}
    return written, {name: host[name].numpy() for name in node.outputs}


def declare_far_shared(library: Library, size: int) -> None:
    """Register the plugin kvgate_check::far_shared with TensorRT, which a process may do once."""
    trt = library.trt
    plugin = trt.plugin
    name = "kvgate_check::far_shared"

    # TensorRT reads the names and annotations of these functions' parameters; none may be left out.
    def describe(x: plugin.TensorDesc) -> plugin.TensorDesc:  # type: ignore[name-defined]
        return x.like()

    def tune(
        x: plugin.TensorDesc,  # type: ignore[name-defined]  # noqa: ARG001
        outputs: tuple[plugin.TensorDesc],  # type: ignore[name-defined]  # noqa: ARG001
    ) -> list[plugin.AutoTuneCombination]:  # type: ignore[name-defined]
        return [plugin.AutoTuneCombination("FP32, FP32", "LINEAR")]

    def compiled(
        x: plugin.TensorDesc,  # type: ignore[name-defined]  # noqa: ARG001
        outputs: tuple[plugin.TensorDesc],  # type: ignore[name-defined]  # noqa: ARG001
        tactic: int,  # noqa: ARG001
    ) -> tuple[str | bytes, str | bytes, plugin.KernelLaunchParams, plugin.SymExprs]:  # type: ignore[name-defined]
        launch = plugin.KernelLaunchParams()
        launch.grid_x, launch.block_x, launch.shared_mem = 1, THREADS, size
        extras = plugin.SymIntExprs(1)
        extras[0] = plugin.SymInt32(size - 4 * THREADS)
        return "far_shared", FAR_SHARED, launch, extras

    plugin.register(name)(describe)
    plugin.autotune(name)(tune)
    plugin.aot_impl(name)(compiled)


def _network(library: Library) -> tuple[Any, Any]:
    trt = library.trt
    builder = trt.Builder(library.log)
    kinds = trt.NetworkDefinitionCreationFlag
    return builder, builder.create_network(1 << int(kinds.STRONGLY_TYPED) | 1 << int(kinds.PREFER_AOT_PYTHON_PLUGINS))


def _mark(network: Any, tensor: Any, name: str) -> None:
    tensor.name = name
    network.mark_output(tensor)


def _run(library: Library, builder: Any, network: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Build the network and run it once on the tensors, bound by name; RuntimeError with the reason if TensorRT refuses."""
    trt = library.trt
    plan = builder.build_serialized_network(network, builder.create_builder_config())
    if plan is None:
        raise RuntimeError(f"TensorRT does not build it: {'; '.join(library.take_errors())}")
    runtime = trt.Runtime(library.log)
    engine = runtime.deserialize_cuda_engine(plan)
    context = engine.create_execution_context()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    for name, tensor in tensors.items():
        if not context.set_tensor_address(name, tensor.data_ptr()):
            raise RuntimeError(f"TensorRT refuses the address of {name}: {'; '.join(library.take_errors())}")
    if not context.execute_async_v3(stream.cuda_stream):
        raise RuntimeError(f"TensorRT does not run it: {'; '.join(library.take_errors())}")
    stream.synchronize()
