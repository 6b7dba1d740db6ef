"""An ONNX bundle and its plans with the plugin, on a fake runtime: all but TensorRT itself."""

from pathlib import Path

import onnx
import pytest
from fake_tensorrt import LIBRARY, FakeDevice, FakeEngine
from onnx_fixtures import make_bundle, nothing
from plugin_graphs import PluginGraph

from pipeline.core.kv import KVPolicy
from stages.engines.base import Mode
from stages.engines.onnx.bundle import Tensor
from stages.engines.onnx.bundle import open_bundle as open_onnx_bundle
from stages.engines.onnx.engine import OnnxEngine
from stages.engines.onnx.engine import load_engine as load_onnx
from stages.engines.tensorrt import build as build_module
from stages.engines.tensorrt.bundle import PLANS, open_bundle
from stages.engines.tensorrt.engine import PlanEngine, open_session
from stages.engines.tensorrt.library import Library
from stages.engines.tensorrt.plan import Parsed
from stages.engines.tensorrt.plan import Plan as BuiltPlan
from stages.engines.tensorrt.plugin import with_plugin, write_plugin_graphs
from stages.engines.tensorrt.shapes import Limits

BATCH, TOKENS, SM = 5, 320, 89
"""Odd numbers of pages and of buffers; three sequences are padded to four."""
GPU = {"name": "NVIDIA L40S", "compute_cap": "8.9", "driver_version": "580"}
TENSORRT = Library("tensorrt", LIBRARY.trt, LIBRARY.log)
TYPES = {"FLOAT16": "HALF", "BFLOAT16": "BF16", "FLOAT8E4M3FN": "FP8"}


class Plans:
    """A policy's ONNX bundle, and its plans with the plugin on a fake runtime."""

    def __init__(self, root: Path, decoder: Path, policy: KVPolicy) -> None:
        self.policy = policy
        self.onnx_bundle, self.folder, out = make_bundle(decoder, root / policy.name, policy), root / "graphs", root / "plans"
        self.folder.mkdir()
        out.mkdir()
        self.info = open_onnx_bundle(self.onnx_bundle)[0].model
        bundled: dict[Mode, Path] = {mode: self.onnx_bundle / f"{mode}.onnx" for mode in PLANS}
        self.limits = Limits(policy, BATCH, TOKENS)
        with pytest.MonkeyPatch.context() as patch:
            stand_in_for_tensorrt(patch)
            written = write_plugin_graphs(bundled, self.folder, info=self.info, limits=self.limits, sm=SM)
            build_with_plugin(self.onnx_bundle, out, policy)
        self.record, _, self.scales = open_bundle(out, "tensorrt")
        self.out = out
        self.graphs = {mode: onnx.load(path, load_external_data=False) for mode, path in written.graphs.items()}
        self.plain = {mode: onnx.load(path, load_external_data=False) for mode, path in bundled.items()}

    def onnx(self) -> OnnxEngine:
        return load_onnx(self.onnx_bundle, threads=1, attention="graph")

    def engine(self, *, interpreted: bool = False) -> tuple[PlanEngine, dict[Mode, PluginGraph]]:
        device = FakeDevice()
        plugins = {
            mode: PluginGraph(self.graphs[mode], self.plain[mode], self.onnx_bundle, interpreted=interpreted) for mode in PLANS
        }
        engines = {mode: FakeEngine(self.onnx_bundle / f"{mode}.onnx", self.record, mode, plugins[mode]) for mode in PLANS}
        sessions = {mode: open_session(TENSORRT, engines[mode], device, self.record, mode, cuda_graphs=True) for mode in PLANS}
        return PlanEngine(self.out, self.record, self.record.limits(self.policy), self.scales, sessions, device), plugins


def stand_in_for_tensorrt(patch: pytest.MonkeyPatch) -> list[onnx.ModelProto]:
    """Let a bundle with the plugin be built without TensorRT, GPU and kernels. Returns the graphs that are parsed."""
    parsed: list[onnx.ModelProto] = []

    def parse(library: Library, path: Path) -> Parsed:
        parsed.append(onnx.load(path, load_external_data=False))
        return parse_as_tensorrt(library, path)

    plugin = "stages.engines.tensorrt.plugin"
    patch.setattr(build_module, "load", lambda _: TENSORRT)
    patch.setattr(build_module, "parse", parse)
    patch.setattr(build_module, "build", lambda parsed, *_: BuiltPlan(b"plan", [], parsed.inputs, parsed.outputs))
    patch.setattr(f"{plugin}.check_gpu", nothing)
    patch.setattr(f"{plugin}.register", nothing)
    for name in ("default_programs", "default_splits"):
        patch.setattr(f"{plugin}.{name}", lambda *_: 3)
    patch.setattr(f"{plugin}.kernel_digests", lambda *_: {})
    return parsed


def build_with_plugin(onnx_bundle: Path, out: Path, policy: KVPolicy) -> None:
    scales = onnx_bundle.with_name(f"{onnx_bundle.name}_scales.json")
    build_module.build_bundle(
        onnx_bundle, out, policy=policy, scales=scales, library="tensorrt",
        max_batch=BATCH, max_tokens=TOKENS, progress=nothing, gpu=GPU, adapt=with_plugin(GPU),
    )  # fmt: skip


def parse_as_tensorrt(library: Library, path: Path) -> Parsed:
    """The inputs and outputs that TensorRT would read in a graph."""
    graph = onnx.load(path, load_external_data=False).graph

    def described(value: onnx.ValueInfoProto) -> Tensor:
        kind = value.type.tensor_type
        name = onnx.TensorProto.DataType.Name(kind.elem_type)
        return Tensor(name=value.name, dtype=TYPES.get(name, name), shape=[d.dim_param or d.dim_value for d in kind.shape.dim])

    return Parsed(library, None, None, None, [described(v) for v in graph.input], [described(v) for v in graph.output])
