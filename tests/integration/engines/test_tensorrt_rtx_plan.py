"""The ONNX engine's graphs as TensorRT-for-RTX plans, built on a machine without a GPU."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from helpers.engines.gpu import pretend_gpu
from helpers.engines.random_llama import BY_NAME, SHIPPED, make_bundle, shared_decoder
from helpers.stride import STRIDE
from helpers.tensorrt.fake import computed_with, make_plans
from onnx import external_data_helper

from stages.core.errors import MissingRequirement, UserError
from stages.engines.bundle import open_bundle
from stages.engines.onnx.bundle import GRAPH
from stages.engines.onnx.config import ComputeDType
from stages.engines.onnx.engine import load_engine as load_onnx
from stages.engines.tensorrt.build import GraphRefusal, build, parse
from stages.engines.tensorrt.bundle import PlanRecord, load_weights, one_token
from stages.engines.tensorrt.engine import load_engine
from stages.engines.tensorrt.library import Library, load
from stages.engines.tensorrt.shapes import PlanLimits
from stages.policies.formats import Format
from stages.policies.policy import KVPolicy, LayerOverride, Side

E5M2 = [policy.name for policy in SHIPPED if any(form.dtype == "fp8_e5m2" for _, form in policy.formats)]
"""Policies with a type that TensorRT lacks: its parser refuses E5M2 pools as inputs."""

TAKEN = [policy for policy in SHIPPED if policy.name not in E5M2]


def layer_formats() -> list[tuple[Format, Format]]:
    """Return the distinct key and value formats of all layers of supported policies, however their scales are measured."""

    def structure(form: Format) -> Format:
        return form.model_copy(update={"scale": "calibrated"}) if form.static else form

    layers = [policy.sides(layer) for policy in TAKEN for layer in (0, 1)]
    sides = [(structure(layer[Side.KEY]), structure(layer[Side.VALUE])) for layer in layers]
    return list({(key.model_dump_json(), value.model_dump_json()): (key, value) for key, value in sides}.values())


def two_layers(first: tuple[Format, Format], second: tuple[Format, Format]) -> KVPolicy:
    """Return a policy with different formats in its two layers, so that one build tests two pairs."""
    override = LayerOverride(layers=(1,), key=second[0], value=second[1])
    return KVPolicy(name="pair", key=first[0], value=first[1], overrides=(override,))


FORMATS = layer_formats()
PAIRS = [two_layers(FORMATS[i], FORMATS[(i + 1) % len(FORMATS)]) for i in range(0, len(FORMATS), 2)]


BFLOAT16 = [BY_NAME["fp8k_int4v_aged"], *(PAIRS[::4] if STRIDE == 1 else [])]
"""Policies that are built in bfloat16."""


@pytest.fixture(scope="module")
def plans(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The plans of fp8k_int4v, and the ONNX bundle that they were built from."""
    root, policy = tmp_path_factory.mktemp("rtx"), BY_NAME["fp8k_int4v"]
    onnx_bundle = make_bundle(decoder, root / "onnx_bundle", policy)
    return onnx_bundle, make_plans(onnx_bundle, root / "plans", policy, targets=[89, 120])


@pytest.mark.every
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_shipped_policy_parses_into_a_network(
    dtype: ComputeDType, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for policy in TAKEN[::STRIDE]:
        bundle = make_bundle(shared_decoder(tmp_path_factory, dtype), tmp_path / policy.name, policy)
        parsed = parse(load("tensorrt_rtx"), bundle / GRAPH)
        graph = onnx.load(bundle / GRAPH, load_external_data=False).graph
        assert {t.name for t in parsed.inputs} == {value.name for value in graph.input}, policy.name
        assert {t.name for t in parsed.outputs} == {value.name for value in graph.output}, policy.name


@pytest.mark.every
@pytest.mark.parametrize(
    "policy", PAIRS[::STRIDE], ids=lambda p: "-".join(f"{form.dtype}_{form.granularity}" for _, form in p.formats)
)
def test_the_formats_of_every_shipped_policy_build_into_a_plan(policy: KVPolicy, decoder: Path, tmp_path: Path) -> None:
    bundle = make_bundle(decoder, tmp_path / "bundle", policy)
    model = onnx.load(bundle / GRAPH, load_external_data=False)
    one_token(model.graph)
    onnx.save(model, bundle / "decode.onnx")
    parsed = parse(load("tensorrt_rtx"), bundle / "decode.onnx")
    plan = build(parsed, PlanLimits(policy, 4, 512).ranges("decode"), [89])
    assert len(plan) > (bundle / "weights.bin").stat().st_size


@pytest.mark.every
@pytest.mark.parametrize("policy", BFLOAT16, ids=lambda policy: policy.name)
def test_a_decoder_in_bfloat16_builds_into_plans(
    policy: KVPolicy, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    onnx_bundle = make_bundle(shared_decoder(tmp_path_factory, "bfloat16"), tmp_path / "bundle", policy)
    out = make_plans(onnx_bundle, tmp_path / "plans", policy)
    record, _, _ = open_bundle(out, PlanRecord, "tensorrt_rtx")
    assert record.model.compute_dtype == "bfloat16"
    assert {weight.dtype for weight in record.weights} == {weight.stored for weight in record.weights} == {"BFLOAT16"}
    for outputs in record.outputs.values():
        assert {t.name: t.dtype for t in outputs}["logits"] == "BF16"
    assert {tensor.dtype for tensor in load_weights(out, record.weights, torch.device("cpu")).values()} == {torch.bfloat16}
    with pytest.raises(UserError, match=r"^backend\.compute_dtype=bfloat16: ONNX Runtime lacks bfloat16 kernels"):
        load_onnx(onnx_bundle, threads=1)


def test_the_bundle_names_its_sources_target_and_library(plans: tuple[Path, Path]) -> None:
    _, out = plans
    record, policy, _ = open_bundle(out, PlanRecord, "tensorrt_rtx")
    assert policy == BY_NAME["fp8k_int4v"]
    assert str(record.built_for) == f"TensorRT for RTX {load('tensorrt_rtx').version} and SM 8.9, 12.0"
    (pool,) = (tensor for tensor in record.inputs["decode"] if tensor.name == "key_pool.1")
    assert (pool.dtype, pool.shape) == ("FP8", ["N", 2, 64, 64])
    assert (record.max_batch, record.max_tokens) == (4, 512)
    dims = {dim for t in record.inputs["decode"] for dim in t.shape if isinstance(dim, str)}
    assert dims == {"B", "P", "N"}  # no exact buffers and no window


def test_the_plans_hold_no_weights_which_are_inputs_of_both(plans: tuple[Path, Path]) -> None:
    onnx_bundle, out = plans
    record, _, _ = open_bundle(out, PlanRecord, "tensorrt_rtx")
    model = onnx.load(onnx_bundle / GRAPH)
    external = onnx.load(onnx_bundle / GRAPH, load_external_data=False).graph
    inline = [t for t in external.initializer if not external_data_helper.uses_external_data(t)]
    names = computed_with(model).keys() - {tensor.name for tensor in inline}
    expected = {name: values for name, values in computed_with(model).items() if name in names}
    loaded = load_weights(out, record.weights, torch.device("cpu"))
    assert loaded.keys() == expected.keys() != set()
    for name, tensor in loaded.items():
        assert np.array_equal(tensor.numpy(), expected[name]), name
    for mode, inputs in record.inputs.items():
        assert names <= {tensor.name for tensor in inputs}
        plan = (out / f"{mode}.plan").read_bytes()
        assert not [name for name, values in expected.items() if values.reshape(-1)[:32].tobytes() in plan]


def test_a_refused_graph_is_named_with_the_librarys_reason(decoder: Path, tmp_path: Path) -> None:
    onnx_bundle = make_bundle(decoder, tmp_path / "onnx_bundle", BY_NAME["fp8"])
    with pytest.raises(UserError, match=r"^kv=fp8: TensorRT for RTX .* refuses its graph: .*sm80.*; choose other formats"):
        make_plans(onnx_bundle, tmp_path / "plans", BY_NAME["fp8"], targets=[80, 89])


def test_a_plan_for_another_gpu_or_version_is_refused(plans: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other differences: tests/unit/engines/test_plans.py."""
    pretend_gpu(monkeypatch)
    ours = load("tensorrt_rtx").version
    monkeypatch.setattr(Library, "version", property(lambda _: "1.8"))
    message = rf"built for TensorRT for RTX {ours} and SM 8\.9, 12\.0, but this machine has TensorRT for RTX 1\.8 and SM 9\.0"
    with pytest.raises(MissingRequirement, match=message):
        load_engine(plans[1], library="tensorrt_rtx")


def test_a_failed_build_reports_tensorrts_reason(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Nothing", ["x"], ["y"], name="odd", domain="elsewhere")
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "odd.onnx")
    with pytest.raises(GraphRefusal, match="Nothing"):
        parse(load("tensorrt_rtx"), tmp_path / "odd.onnx")
