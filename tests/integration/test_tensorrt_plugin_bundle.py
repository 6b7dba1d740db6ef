"""Bundles of plans with the attention plugin: everything but TensorRT itself."""

import json
from pathlib import Path

import onnx
import pytest
from onnx_fixtures import BY_NAME, make_bundle, shared_decoder
from plugin_plans import build_with_plugin, stand_in_for_tensorrt
from tensorrt_graph_cases import AGED, INT4_KEYS, SM, Surgery, surgeries

from pipeline.core.errors import UserError
from stages.engines.base import Mode
from stages.engines.bundle import BUNDLE_FILE
from stages.engines.onnx.bundle import Bundle
from stages.engines.tensorrt.bundle import PLANS, open_bundle
from stages.engines.tensorrt.plugin import write_plugin_graphs
from stages.engines.tensorrt.weights import as_inputs


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Surgery]:
    return surgeries(tmp_path_factory)


def test_the_bundle_says_which_layers_have_the_plugin_and_which_kernels(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, kernels, out = (
        stand_in_for_tensorrt(monkeypatch),
        {"decode_partial.0": "a1", "append.group0": "c3"},
        tmp_path / "plans",
    )
    monkeypatch.setattr("stages.engines.tensorrt.plugin.kernel_digests", lambda *_: kernels)
    onnx_bundle = make_bundle(shared_decoder(tmp_path_factory, "float32"), tmp_path / "onnx_bundle", AGED)
    out.mkdir()
    build_with_plugin(onnx_bundle, out, AGED)
    record, _, _ = open_bundle(out, "tensorrt")
    assert (record.plugins, record.native, record.stored) == (kernels, {"1": INT4_KEYS}, ((0,),))
    assert record.built_for.compute_capabilities == ["8.9"]
    operators = [[node.op_type for node in model.graph.node] for model in parsed]
    attention = {name for names in operators for name in names if name.endswith("_partial_kstatic_vdynamic_exact")}
    assert attention == {"decode_partial_kstatic_vdynamic_exact", "context_partial_kstatic_vdynamic_exact"}
    for names in operators:
        assert names[-1] == "append_kstatic_vdynamic_exact"
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
