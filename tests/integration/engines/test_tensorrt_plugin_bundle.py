"""Bundles of plans with the attention plugin, with everything but TensorRT itself."""

from functools import partial
from pathlib import Path

import onnx
import pytest
from fake_tensorrt import LIBRARY, make_plans
from onnx_fixtures import make_bundle
from tensorrt_graph_cases import AGED, INT4_KEYS

from stages.engines.bundle import open_bundle
from stages.engines.tensorrt import build as build_module
from stages.engines.tensorrt.build import Parsed
from stages.engines.tensorrt.bundle import GraphTensor, PlanRecord
from stages.engines.tensorrt.library import Library
from stages.engines.tensorrt.plugin import with_plugin

GPU = {"name": "NVIDIA L40S", "compute_cap": "8.9", "driver_version": "580"}
TENSORRT = Library("tensorrt", LIBRARY.trt, LIBRARY.log)
TYPES = {"FLOAT16": "HALF", "BFLOAT16": "BF16", "FLOAT8E4M3FN": "FP8"}


def stand_in_for_tensorrt(patch: pytest.MonkeyPatch) -> list[onnx.ModelProto]:
    """Let a bundle with the plugin be built without TensorRT, GPU and kernels. Returns the list of parsed graphs."""
    parsed: list[onnx.ModelProto] = []

    def parse(library: Library, path: Path) -> Parsed:
        parsed.append(onnx.load(path, load_external_data=False))
        return parse_as_tensorrt(library, path)

    plugin = "stages.engines.tensorrt.plugin"
    patch.setattr(build_module, "load", lambda _: TENSORRT)
    patch.setattr(build_module, "parse", parse)
    patch.setattr(build_module, "build", lambda *_: b"plan")
    patch.setattr(f"{plugin}.register", lambda *_: None)
    patch.setattr(f"{plugin}.default_counts", lambda *_: {"decode": 3, "prefill": 3})
    return parsed


def parse_as_tensorrt(library: Library, path: Path) -> Parsed:
    """Return the inputs and outputs that TensorRT would read from a graph."""
    graph = onnx.load(path, load_external_data=False).graph

    def described(value: onnx.ValueInfoProto) -> GraphTensor:
        kind = value.type.tensor_type
        name = onnx.TensorProto.DataType.Name(kind.elem_type)
        return GraphTensor(
            name=value.name, dtype=TYPES.get(name, name), shape=[d.dim_param or d.dim_value for d in kind.shape.dim]
        )

    return Parsed(library, None, None, None, [described(v) for v in graph.input], [described(v) for v in graph.output])


def test_the_bundle_says_which_layers_have_not_the_plugin_and_why(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = stand_in_for_tensorrt(monkeypatch)
    onnx_bundle = make_bundle(decoder, tmp_path / "onnx_bundle", AGED)
    with_the_plugin = {"library": "tensorrt", "targets": (), "gpu": GPU, "adapt": partial(with_plugin, sm=89)}
    out = make_plans(onnx_bundle, tmp_path / "plans", AGED, **with_the_plugin)
    record, _, _ = open_bundle(out, PlanRecord, "tensorrt")
    assert record.native == {"1": INT4_KEYS}
    assert record.built_for.compute_capabilities == ["8.9"]
    operators = [[node.op_type for node in model.graph.node] for model in parsed]
    attention = {name for names in operators for name in names if name.endswith("_partial_kstatic_vdynamic_exact")}
    assert attention == {"decode_partial_kstatic_vdynamic_exact", "context_partial_kstatic_vdynamic_exact"}
    for names in operators:
        assert "PagedAttention_1" in names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["onnx_bundle", "onnx_bundle_scales.json", "plans"]
