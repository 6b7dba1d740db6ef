"""Decode graphs parse and build into TensorRT-for-RTX plans on a machine without a GPU."""

from pathlib import Path

import onnx
import pytest
import tensorrt_rtx as trt
from onnx_fixtures import BY_NAME, SHIPPED, make_bundle, shared_decoder

SIZES = {"B": (1, 4, 16), "P": (1, 8, 16), "N": (1, 64, 256), "M": (1, 4, 16), "Y": (1, 2, 8), "NW": (1, 16, 64)}
"""Smallest, most likely and largest value of each dynamic dimension."""


def build_plan(graph: Path) -> bytes:
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(graph)), [str(parser.get_error(i)) for i in range(parser.num_errors)]
    profile = builder.create_optimization_profile()
    for value in onnx.load(graph, load_external_data=False).graph.input:
        dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        profile.set_shape(value.name, *([SIZES[d][i] if isinstance(d, str) else d for d in dims] for i in range(3)))
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None
    return bytes(plan)


E5M2 = [policy.name for policy in SHIPPED if any(form.dtype == "fp8_e5m2" for _, form in policy.formats)]
"""TensorRT has no such type: its parser refuses pools of it as inputs."""


@pytest.mark.parametrize("name", [policy.name for policy in SHIPPED if policy.name not in E5M2])
def test_every_shipped_policy_builds_into_a_plan(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = make_bundle(shared_decoder(tmp_path_factory, "float32"), tmp_path / "bundle", BY_NAME[name])
    plan = build_plan(bundle / "decode.onnx")
    assert len(plan) > (bundle / "weights.bin").stat().st_size / 2


@pytest.mark.parametrize("name", ["fp8k_int4v", "int4_asym", "window_of_keys_and_values"])
def test_a_float16_decoder_builds_into_a_plan(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert build_plan(
        make_bundle(shared_decoder(tmp_path_factory, "float16"), tmp_path / "bundle", BY_NAME[name]) / "decode.onnx"
    )


@pytest.mark.parametrize("name", E5M2)
def test_e5m2_is_refused_by_the_parser(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = make_bundle(shared_decoder(tmp_path_factory, "float32"), tmp_path / "bundle", BY_NAME[name])
    with pytest.raises(AssertionError, match="Failed to convert ONNX date type"):
        build_plan(bundle / "decode.onnx")
