"""Bundles of plans with the attention plugin: everything but TensorRT itself."""

import json
from pathlib import Path

import onnx
import pytest
from fake_tensorrt import LIBRARY
from onnx_fixtures import BY_NAME, make_bundle, nothing, shared_decoder
from tensorrt_graph_cases import AGED, INT4_KEYS, SM, Surgery, surgeries

from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy
from stages.engines.base import Mode
from stages.engines.bundle import BUNDLE_FILE
from stages.engines.onnx.bundle import Bundle, Tensor
from stages.engines.tensorrt import build as build_module
from stages.engines.tensorrt.bundle import PLANS, as_inputs, open_bundle
from stages.engines.tensorrt.library import Library
from stages.engines.tensorrt.plan import Parsed
from stages.engines.tensorrt.plan import Plan as BuiltPlan
from stages.engines.tensorrt.plugin import with_plugin, write_plugin_graphs

BATCH, TOKENS = 5, 320
GPU = {"name": "NVIDIA L40S", "compute_cap": "8.9", "driver_version": "580"}
TENSORRT = Library("tensorrt", LIBRARY.trt, LIBRARY.log)
TYPES = {"FLOAT16": "HALF", "BFLOAT16": "BF16", "FLOAT8E4M3FN": "FP8"}


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


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Surgery]:
    return surgeries(tmp_path_factory)


def test_the_bundle_says_which_layers_have_the_plugin_and_which_kernels(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, kernels, out = stand_in_for_tensorrt(monkeypatch), {"decode_partial.0": "a1"}, tmp_path / "plans"
    monkeypatch.setattr("stages.engines.tensorrt.plugin.kernel_digests", lambda *_: kernels)
    onnx_bundle = make_bundle(shared_decoder(tmp_path_factory, "float32"), tmp_path / "onnx_bundle", AGED)
    out.mkdir()
    build_with_plugin(onnx_bundle, out, AGED)
    record, _, _ = open_bundle(out, "tensorrt")
    assert (record.plugins, record.native) == (kernels, {"1": INT4_KEYS})
    assert record.built_for.compute_capabilities == ["8.9"]
    operators = [[node.op_type for node in model.graph.node] for model in parsed]
    attention = {name for names in operators for name in names if name.endswith("_partial_kstatic_vdynamic_exact")}
    assert attention == {"decode_partial_kstatic_vdynamic_exact", "context_partial_kstatic_vdynamic_exact"}
    for names in operators:
        assert "PagedAttention_1" in names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["onnx_bundle", "onnx_bundle_scales.json", "plans"]


def test_a_graph_without_the_plugin_is_built_as_it_is_and_without_its_kernels(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> int:
        raise AssertionError("no layer has kernels")

    parsed, policy, out = stand_in_for_tensorrt(monkeypatch), BY_NAME["int8_asym"], tmp_path / "plans"
    for name in ("default_programs", "register", "kernel_digests"):
        monkeypatch.setattr(f"stages.engines.tensorrt.plugin.{name}", none)
    onnx_bundle = make_bundle(shared_decoder(tmp_path_factory, "float32"), tmp_path / "onnx_bundle", policy)
    out.mkdir()
    build_with_plugin(onnx_bundle, out, policy)
    whole = [onnx.load(onnx_bundle / f"{mode}.onnx", load_external_data=False) for mode in PLANS]
    for model in whole:
        as_inputs(model)
    assert parsed == whole
    assert set(open_bundle(out, "tensorrt")[0].native) == {"0", "1"}


def test_a_bundle_that_does_not_say_the_scaling_loads_and_must_be_built_again_for_the_plugin(
    graphs: dict[str, Surgery], tmp_path: Path
) -> None:
    surgery = graphs["aged"]
    older = json.loads((surgery.onnx_bundle / BUNDLE_FILE).read_text())
    del older["model"]["scaling"]
    info = Bundle.model_validate_json(json.dumps(older)).model
    assert info.scaling is None
    assert surgery.bundle.model.scaling == pytest.approx(info.head_dim**-0.5)
    bundled: dict[Mode, Path] = {"decode": surgery.onnx_bundle / "decode.onnx"}
    with pytest.raises(UserError, match=r"aged/bundle\.json: model\.scaling is missing, .*: build the engine again"):
        write_plugin_graphs(bundled, tmp_path, info=info, limits=surgery.limits, sm=SM)
    assert not any(tmp_path.iterdir())
