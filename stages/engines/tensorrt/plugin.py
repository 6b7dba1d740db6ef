"""backend=tensorrt: plans with the attention plugin in them, and the digests of the kernels that they will hold.

TensorRT compiles nothing of it: the kernels are Triton's PTX, made here ahead of time, and end up inside the plan, which needs
neither Python nor a plugin library to run.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import onnx

from pipeline.artifacts.files import link_or_copy
from pipeline.core.errors import MissingRequirement
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Progress
from plugins.kv_attention.layout import CacheLayout
from plugins.kv_attention.tensorrt_nodes import bits_float
from stages.engines.onnx.bundle import WEIGHTS_FILE, ModelInfo
from stages.engines.tensorrt import build
from stages.engines.tensorrt.build import Adapted
from stages.engines.tensorrt.shapes import Limits
from stages.engines.tensorrt.surgery import choose_layers, use_plugin


def build_bundle(
    twin: Path,
    out: Path,
    *,
    policy: KVPolicy,
    scales: Path,
    library: Literal["tensorrt"],
    max_batch: int,
    max_tokens: int,
    gpu: Mapping[str, str],
    progress: Progress,
) -> None:
    """As stages.engines.tensorrt.build.build_bundle, with the plugin's kernels in place of the attention function where they
    hold the formats. `gpu`, an entry of pipeline.artifacts.hardware.gpus(), must be the one that builds.

    Raises UserError when TensorRT does not take the policy's graphs, MissingRequirement when something is not installed.
    """
    check_gpu(gpu)
    sm = int(gpu["compute_cap"].replace(".", ""))

    @contextmanager
    def with_plugin(graph: Path, info: ModelInfo, limits: Limits) -> Iterator[Adapted]:
        chosen = choose_layers(limits.policy, info.shape, info.q_heads)
        if not chosen.layouts:
            yield Adapted(graph, chosen.native, {})
            return
        # beside `out`, so that the weights can be linked
        with TemporaryDirectory(prefix=".plugin-", dir=out.parent) as folder:
            yield write_plugin_graph(graph, Path(folder), info=info, limits=limits, sm=sm)

    build.build_bundle(
        twin,
        out,
        policy=policy,
        scales=scales,
        library=library,
        max_batch=max_batch,
        max_tokens=max_tokens,
        progress=progress,
        gpu=gpu,
        adapt=with_plugin,
    )


def check_gpu(gpu: Mapping[str, str]) -> None:
    """Raise MissingRequirement unless `gpu`, nvidia-smi's first, is the one that CUDA uses here: TensorRT builds on that."""
    import torch

    if not torch.cuda.is_available():
        raise MissingRequirement(
            f"backend=tensorrt: torch {torch.__version__} cannot use the GPU here ({gpu['name']}): install a CUDA build of "
            "torch (pip install torch --index-url https://download.pytorch.org/whl/cu130)"
        )
    major, minor = torch.cuda.get_device_capability()
    used, listed = f"{torch.cuda.get_device_name()}, SM {major}.{minor}", f"{gpu['name']}, SM {gpu['compute_cap']}"
    if used != listed:
        order, visible = (os.environ.get(name, "unset") for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"))
        raise MissingRequirement(
            f"backend=tensorrt: CUDA's device 0 is {used}, but nvidia-smi's first GPU, which plans are built for, is {listed} "
            f"(CUDA_DEVICE_ORDER={order}, CUDA_VISIBLE_DEVICES={visible}): set CUDA_DEVICE_ORDER=PCI_BUS_ID and "
            "CUDA_VISIBLE_DEVICES=0, or run in a container that is given the one GPU"
        )


def write_plugin_graph(graph: Path, folder: Path, *, info: ModelInfo, limits: Limits, sm: int) -> Adapted:
    """A decode graph with plugin nodes in `folder`, beside its weights. The plugin serves at least one layer.

    Registers the plugin with TensorRT. sm: 90 for SM 9.0. Raises MissingRequirement without Triton.
    """
    model = onnx.load(graph, load_external_data=False)
    replaced = use_plugin(model, info, limits.policy, splits=splits_here(info, limits), sm=sm)
    register()
    out = folder / graph.name
    onnx.save(model, out)
    link_or_copy(graph.with_name(WEIGHTS_FILE), folder / WEIGHTS_FILE)
    return Adapted(out, replaced.native, kernel_digests(model, replaced.layouts, info))


def register() -> None:
    """Declare the plugin's operations to TensorRT; once a process, since TensorRT knows each name once."""
    with _triton():
        import plugins.kv_attention.tensorrt_plugin  # noqa: F401


def splits_here(info: ModelInfo, limits: Limits) -> int:
    """Splits of a sequence's pages that fill this GPU with one sequence; more sequences have more programs anyway."""
    import torch

    with _triton():
        from plugins.kv_attention.ops import default_splits
    return default_splits(torch.device("cuda"), 1, info.kv_heads, limits.sequence_pages)


def kernel_digests(model: onnx.ModelProto, layouts: Mapping[int, CacheLayout], info: ModelInfo) -> dict[str, str]:
    """sha256 of the PTX behind each plugin node, by the node's name."""
    with _triton():
        from plugins.kv_attention import aot
    nodes = {node.name: {a.name: a.i for a in node.attribute} for node in model.graph.node}
    made: dict[tuple[object, ...], tuple[str, str]] = {}
    digests: dict[str, str] = {}
    for layer, layout in layouts.items():
        said = nodes[f"decode_partial.{layer}"]
        key = (layout, *said.values())
        if key not in made:
            decode = aot.compile_decode(
                layout,
                group=info.q_heads // info.kv_heads,
                query_dtype=info.compute_dtype,
                scaling=bits_float(said["scaling_bits"]),
                sm=said["sm"],
            )
            reduce = aot.compile_reduce(layout, splits=said["splits"], out_dtype=info.compute_dtype, sm=said["sm"])
            made[key] = (_sha256(decode.ptx), _sha256(reduce.ptx))
        digests[f"decode_partial.{layer}"], digests[f"decode_reduce.{layer}"] = made[key]
    return digests


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def _triton() -> Iterator[None]:
    """Around imports of the kernels: MissingRequirement when Triton is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MissingRequirement(
            "backend=tensorrt needs Triton for the attention plugin: pip install 'kvgate[kernels]'"
        ) from error
