"""The attention plugin in a plan: the graph that uses it, and the digests of the kernels that the plan will hold.

TensorRT compiles nothing of it: the kernels are Triton's PTX, made here ahead of time, and end up inside the plan, which needs
neither Python nor a plugin library to run.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx

from pipeline.errors import MissingRequirement
from plugins.kv_attention.layout import CacheLayout
from plugins.kv_attention.tensorrt_nodes import bits_float
from stages.files import link_or_copy
from stages.onnx.bundle import WEIGHTS_FILE, ModelInfo
from stages.tensorrt.shapes import Limits
from stages.tensorrt.surgery import Replaced, use_plugin


def write_plugin_graph(
    graph: Path, folder: Path, *, info: ModelInfo, limits: Limits, sm: int
) -> tuple[Path, Replaced, dict[str, str]]:
    """A decode graph with plugin nodes in `folder`, beside its weights; which layers they serve; digests of their kernels.

    Registers the plugin with TensorRT. sm: 90 for SM 9.0. Raises MissingRequirement without Triton or a CUDA build of torch.
    """
    model = onnx.load(graph, load_external_data=False)
    replaced = use_plugin(model, info, limits.policy, splits=splits_here(info, limits), sm=sm)
    if replaced.layouts:
        register()
    out = folder / graph.name
    onnx.save(model, out)
    link_or_copy(graph.with_name(WEIGHTS_FILE), folder / WEIGHTS_FILE)
    return out, replaced, kernel_digests(model, replaced.layouts, info) if replaced.layouts else {}


def register() -> None:
    """Declare the plugin's operations to TensorRT; once a process, since TensorRT knows each name once."""
    with _triton():
        import plugins.kv_attention.tensorrt_plugin  # noqa: F401


def splits_here(info: ModelInfo, limits: Limits) -> int:
    """Splits of a sequence's pages that fill this GPU with one sequence; more sequences have more programs anyway."""
    import torch

    if not torch.cuda.is_available():
        raise MissingRequirement(
            f"backend=tensorrt: torch {torch.__version__} cannot use a GPU here, and the attention's splits are chosen for it: "
            "install a CUDA build of torch (pip install torch --index-url https://download.pytorch.org/whl/cu130)"
        )
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
