"""Quantize functions alone, as ONNX Runtime runs them: rounding, saturation, packing, the floor of a scale."""

from typing import Literal

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from pipeline.kv import Format
from stages.onnx.formats import MIN_SCALE, SCALE_STORAGE, Side
from stages.onnx.functions import quantize_function
from stages.onnx.graph import DOMAIN, FLOAT_TYPES, NUMPY_FLOATS, OPSET

FP8 = Format(dtype="fp8_e4m3", granularity="per_tensor", scale="calibrated")
FLOAT = onnx.TensorProto.FLOAT


def quantize(
    x: np.ndarray, form: Format, scale: float | None = None, compute: Literal["float32", "float16"] = "float32"
) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes and stored scales of x (B, H, S, D) through the function's graph."""
    side = Side(form, x.shape[1], x.shape[3])
    function = quantize_function("QuantizeKey", 0, side, compute)
    inputs = [helper.make_tensor_value_info("x", FLOAT_TYPES[compute], x.shape)]
    if scale is not None:
        inputs.append(helper.make_tensor_value_info("scale", FLOAT, [1]))
    outputs = [helper.make_tensor_value_info("codes", side.storage.onnx_type, [*x.shape[:3], side.width])]
    if side.groups:
        outputs.append(helper.make_tensor_value_info("scales", SCALE_STORAGE.onnx_type, [*x.shape[:3], side.groups]))
    node = helper.make_node(function.name, [i.name for i in inputs], [o.name for o in outputs], domain=DOMAIN)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, outputs), functions=[function], opset_imports=imports, ir_version=10
    )
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_cpu_input("x", x.astype(NUMPY_FLOATS[compute]))
    if scale is not None:
        binding.bind_cpu_input("scale", np.array([scale], np.float32))
    codes = np.zeros((*x.shape[:3], side.width), side.storage.numpy_type)
    binding.bind_output("codes", "cpu", 0, side.storage.onnx_type, codes.shape, codes.ctypes.data)
    scales = np.zeros((*x.shape[:3], side.groups), np.float16)
    if side.groups:
        binding.bind_output("scales", "cpu", 0, SCALE_STORAGE.onnx_type, scales.shape, scales.ctypes.data)
    session.run_with_iobinding(binding)
    return codes, scales if side.groups else None


@pytest.mark.parametrize("compute", ["float32", "float16"])
def test_fp8_rounds_every_float16_as_ml_dtypes_does_and_saturates(compute: Literal["float32", "float16"]) -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)].astype(np.float32)
    x = np.concatenate([finite, np.zeros(-len(finite) % 64, np.float32)]).reshape(1, 1, -1, 64)
    codes, _ = quantize(x, FP8, 1.0, compute)
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(codes, expected)


def test_a_static_scale_divides() -> None:
    x = np.linspace(-3, 3, 64, dtype=np.float32).reshape(1, 1, 1, 64)
    codes, _ = quantize(x, FP8, 2.0)
    np.testing.assert_array_equal(codes, (x / 2).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8_e4m3"])
def test_a_zero_token_gets_the_floor_scale_and_zero_codes(dtype: Literal["int8", "int4", "fp8_e4m3"]) -> None:
    form = Format(dtype=dtype, granularity="per_group", group_size=16, scale="dynamic")
    codes, scales = quantize(np.zeros((1, 2, 3, 64), np.float32), form)
    assert scales is not None
    assert scales.shape == (1, 2, 3, 4)
    assert np.all(scales == np.float16(MIN_SCALE))
    assert np.all(codes == (8 if dtype == "int4" else 0))


def test_int4_packs_the_low_half_of_the_channels_into_the_low_nibble_plus_eight() -> None:
    numbers = np.tile(np.arange(-7, 8), 5)[:64].astype(np.float32).reshape(1, 1, 1, 64)
    codes, scales = quantize(numbers * 0.5, Format(dtype="int4", granularity="per_token", scale="dynamic"))
    assert scales == np.float16(0.5)
    raw = codes[0, 0, 0].view(np.uint8)
    np.testing.assert_array_equal((raw & 15).astype(int) - 8, numbers[0, 0, 0, :32])
    np.testing.assert_array_equal(codes[0, 0, 0] >> 4, numbers[0, 0, 0, 32:])


@pytest.mark.parametrize(("head_dim", "size"), [(96, 32), (80, 16)])
def test_an_odd_number_of_int4_groups_keeps_every_channel_within_half_a_step_of_its_group(head_dim: int, size: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 2, 3, head_dim)).astype(np.float32) * np.arange(1, head_dim + 1)
    codes, scales = quantize(x, Format(dtype="int4", granularity="per_group", group_size=size, scale="dynamic"))
    assert scales is not None
    numbers = np.concatenate([(codes.view(np.uint8) & 15).astype(int) - 8, codes >> 4], -1)
    step = scales.astype(np.float32).repeat(size, -1)
    np.testing.assert_array_less(np.abs(numbers * step - x), 0.505 * step)


def test_ties_round_to_the_even_code() -> None:
    x = np.zeros((1, 1, 1, 64), np.float32)
    x[..., :5] = [0.5, 1.5, 2.5, -0.5, -1.5]
    codes, _ = quantize(x, Format(dtype="int8", granularity="per_tensor", scale="calibrated"), 1.0)
    assert codes[0, 0, 0, :5].tolist() == [0, 2, 2, 0, -2]


def test_codes_use_the_rounded_scale_so_that_quantizing_again_changes_nothing() -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 50, 64)).astype(np.float32)
    form = Format(dtype="int8", granularity="per_token", scale="dynamic")
    codes, scales = quantize(x, form)
    assert scales is not None
    read = codes.astype(np.float32) * scales.astype(np.float32)
    assert np.abs(read - x).max() <= 0.51 * scales.max()
    again, _ = quantize(read, form)
    np.testing.assert_array_equal(again, codes)
