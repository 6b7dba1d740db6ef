"""Bundles of plans with the attention plugin: everything but TensorRT itself."""

import json
from pathlib import Path

import onnx
import pytest
from onnx_fixtures import BY_NAME, make_bundle, nothing, shared_decoder
from plugin_plans import GPU
from tensorrt_graph_cases import AGED, INT4_KEYS, PROGRAMS, SM, SPLITS, Surgery, surgeries

from pipeline.core.errors import UserError
from stages.engines.base import Mode
from stages.engines.bundle import BUNDLE_FILE
from stages.engines.onnx.bundle import Bundle
from stages.engines.tensorrt import build as build_module
from stages.engines.tensorrt.bundle import open_bundle
from stages.engines.tensorrt.library import Library, load
from stages.engines.tensorrt.plan import Parsed
from stages.engines.tensorrt.plan import Plan as BuiltPlan
from stages.engines.tensorrt.plugin import with_plugin, write_plugin_graphs
from stages.engines.tensorrt.weights import as_inputs


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Surgery]:
    return surgeries(tmp_path_factory)


def test_the_bundle_says_which_layers_have_the_plugin_and_which_kernels(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but TensorRT itself: the graph that it reads, and the bundle's record."""
    operators: dict[str, list[str]] = {}
    rtx = load("tensorrt_rtx")

    def parse_like_tensorrt(library: Library, graph: Path) -> Parsed:
        operators[graph.name] = [node.op_type for node in onnx.load(graph, load_external_data=False).graph.node]
        return Parsed(library, None, None, None, [], [])

    monkeypatch.setattr(build_module, "load", lambda _: Library("tensorrt", rtx.trt, rtx.log))
    monkeypatch.setattr(build_module, "parse", parse_like_tensorrt)
    monkeypatch.setattr(build_module, "build", lambda parsed, *_: BuiltPlan(b"plan", [], parsed.inputs, parsed.outputs))
    monkeypatch.setattr("stages.engines.tensorrt.plugin.check_gpu", lambda _: None)
    monkeypatch.setattr("stages.engines.tensorrt.plugin.default_programs", lambda *_: PROGRAMS)
    monkeypatch.setattr("stages.engines.tensorrt.plugin.default_splits", lambda *_: SPLITS)
    monkeypatch.setattr("stages.engines.tensorrt.plugin.register", lambda: None)
    kernels = {"decode_partial.0": "a1", "append.group0": "c3"}
    monkeypatch.setattr("stages.engines.tensorrt.plugin.kernel_digests", lambda *_: kernels)
    onnx_bundle = make_bundle(shared_decoder(tmp_path_factory, "float32"), tmp_path / "onnx_bundle", AGED)
    out = tmp_path / "plans"
    out.mkdir()
    build_module.build_bundle(
        onnx_bundle, out, policy=AGED, scales=tmp_path / "onnx_bundle_scales.json", library="tensorrt",
        max_batch=4, max_tokens=512, progress=nothing,
        gpu=GPU, adapt=with_plugin(GPU),
    )  # fmt: skip
    record, _, _ = open_bundle(out, "tensorrt")
    assert record.plugins == kernels
    assert record.native == {"1": INT4_KEYS}
    assert record.stored == ((0,),)
    assert record.built_for.compute_capabilities == ["8.9"]
    assert "decode_partial_kstatic_vdynamic_exact" in operators["decode.onnx"]
    assert "context_partial_kstatic_vdynamic_exact" in operators["prefill.onnx"]
    assert all(names[-1] == "append_kstatic_vdynamic_exact" for names in operators.values())
    assert "PagedAttention_1" in operators["prefill.onnx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["onnx_bundle", "onnx_bundle_scales.json", "plans"]


def test_a_graph_without_the_plugin_is_built_as_it_is_and_without_its_kernels(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> int:
        raise AssertionError("no layer has kernels")

    def parse(library: Library, graph: Path) -> Parsed:
        parsed_graphs[graph.name] = onnx.load(graph, load_external_data=False)
        return Parsed(library, None, None, None, [], [])

    parsed_graphs: dict[str, onnx.ModelProto] = {}
    rtx = load("tensorrt_rtx")
    monkeypatch.setattr(build_module, "load", lambda _: Library("tensorrt", rtx.trt, rtx.log))
    monkeypatch.setattr(build_module, "parse", parse)
    monkeypatch.setattr(build_module, "build", lambda parsed, *_: BuiltPlan(b"plan", [], parsed.inputs, parsed.outputs))
    monkeypatch.setattr("stages.engines.tensorrt.plugin.check_gpu", lambda _: None)
    monkeypatch.setattr("stages.engines.tensorrt.plugin.default_programs", none)
    monkeypatch.setattr("stages.engines.tensorrt.plugin.register", none)
    policy = BY_NAME["int8_asym"]
    onnx_bundle = make_bundle(shared_decoder(tmp_path_factory, "float32"), tmp_path / "onnx_bundle", policy)
    out = tmp_path / "plans"
    out.mkdir()
    build_module.build_bundle(
        onnx_bundle, out, policy=policy, scales=tmp_path / "onnx_bundle_scales.json", library="tensorrt",
        max_batch=4, max_tokens=512, progress=nothing,
        gpu=GPU, adapt=with_plugin(GPU),
    )  # fmt: skip
    for name in ("prefill.onnx", "decode.onnx"):
        whole = onnx.load(onnx_bundle / name, load_external_data=False)
        as_inputs(whole)
        assert parsed_graphs.pop(name) == whole
    assert parsed_graphs == {}
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
