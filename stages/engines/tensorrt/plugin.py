"""backend=tensorrt: plans with the attention plugin.

TensorRT does not compile the plugin's kernels: they are Triton's PTX, compiled here ahead of time, and become part of the
plan, which needs neither Python nor a plugin library to run.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import onnx

from pipeline.core.errors import MissingRequirement
from plugins.kv_attention.kernels.context_variants import WIDEST, context_blocks, context_variant
from plugins.kv_attention.kernels.variants import Setting, decode_variant
from plugins.kv_attention.layout import CacheLayout
from stages.engines.base import Mode
from stages.engines.onnx.bundle import ModelInfo
from stages.engines.paged.kernel_layout import choose_layers
from stages.engines.tensorrt.shapes import Limits
from stages.engines.tensorrt.surgery import use_plugin


def check_gpu(gpu: Mapping[str, str]) -> None:
    """Raise MissingRequirement unless `gpu`, nvidia-smi's first, is the one that CUDA uses, on which TensorRT builds."""
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


def with_plugin(
    graphs: Mapping[Mode, Path], folder: Path, info: ModelInfo, limits: Limits, *, sm: int
) -> tuple[Mapping[Mode, Path], dict[int, str]]:
    """Put the plugin into the layers that the kernels hold: graphs without weights in `folder`, the given ones without such.

    The second is the reason of each layer that they do not hold.
    """
    layers = choose_layers(limits.policy, info.shape, info.q_heads)
    native = {layer: str(refusal) for layer, refusal in layers.refusals.items()}
    if not layers.layouts:
        return graphs, native
    register()
    counts = {"decode": default_programs(info, limits, sm), "prefill": default_splits(info, limits, sm)}
    written = {mode: folder / graph.name for mode, graph in graphs.items()}
    for mode, graph in graphs.items():
        model = onnx.load(graph, load_external_data=False)
        use_plugin(model, info, limits.policy, mode, programs=counts[mode], sm=sm)
        onnx.save(model, written[mode])
    return written, native


def register() -> None:
    """Declare the plugin's operations to TensorRT, once a process: TensorRT takes each name once."""
    import plugins.kv_attention.tensorrt_plugin  # noqa: F401


def default_programs(info: ModelInfo, limits: Limits, sm: int) -> int:
    """Return the programs over the pages of a KV head that fill this GPU, in every layer that the kernels hold."""
    import torch

    from plugins.kv_attention import launch

    layouts = choose_layers(limits.policy, info.shape, info.q_heads).layouts.values()
    resident = min(decode_variant(_setting(layout, info, sm)).resident for layout in layouts)
    batch, pages, sm_count = limits.max_batch, limits.sequence_pages, launch.sm_count(torch.device("cuda"))
    return launch.choose_programs(batch, info.kv_heads, pages, sm_count=sm_count, resident=resident)


def default_splits(info: ModelInfo, limits: Limits, sm: int) -> int:
    """Return the splits over a sequence's pages with which a whole chunk fills this GPU, in every layer of the kernels."""
    import torch

    from plugins.kv_attention import context, launch

    splits = []
    for layout in choose_layers(limits.policy, info.shape, info.q_heads).layouts.values():
        variant = context_variant(_setting(layout, info, sm))
        programs = launch.sm_count(torch.device("cuda")) * variant.resident
        blocks = context_blocks(limits.chunk, 1, variant, ragged=False)
        splits.append(context.choose_splits(blocks, info.kv_heads, limits.sequence_pages, programs))
    return min(splits)


def _setting(layout: CacheLayout, info: ModelInfo, sm: int) -> Setting:
    """What the kernels of a layer are compiled for: of several new tokens, for a chunk of a prompt."""
    return Setting(layout, info.compute_dtype, sm, info.q_heads // info.kv_heads, rows=WIDEST)
