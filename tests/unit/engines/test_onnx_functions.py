"""Single functions in ONNX Runtime, compared with the reference engine's independent formulas.

Attention in bfloat16 must equal float32 attention, rounded once.
"""

from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from helpers.engines.attention import FLOATS, AttentionCase, Heads
from helpers.policies.formats import FORMATS as EVERY_FORMAT
from helpers.policies.formats import fitting, name
from onnx import helper

from stages.engines.onnx.build import IR_VERSION
from stages.engines.onnx.config import ComputeDType
from stages.engines.onnx.engine import GraphSession
from stages.engines.onnx.export import _restore_division
from stages.engines.onnx.formats import SideCodec
from stages.engines.onnx.functions import quantize_function
from stages.engines.reference import formats as reference
from stages.policies.arithmetic_onnx import FLOAT_TYPES, OPSET, onnx_type
from stages.policies.arithmetic_torch import Static
from stages.policies.formats import Format
from stages.policies.policy import KVPolicy, Side
from stages.policies.scales import KVScales, SideScales
from stages.policies.spec import ONNX_DOMAIN

UNIT = SideScales(scale=(1.0,))
FLOAT = onnx.TensorProto.FLOAT


def quantize(
    x: np.ndarray, form: Format, static: SideScales | None = None, compute: ComputeDType = "float32"
) -> list[np.ndarray]:
    """Run the quantization function on x (B, H, S, D); return the stored arrays in the order of SideCodec.arrays."""
    codec = SideCodec(Side.KEY, form, x.shape[1], x.shape[3])
    function = quantize_function(0, codec, compute)
    inputs = [helper.make_tensor_value_info("x", FLOAT_TYPES[compute], x.shape)]
    inputs += [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in codec.constants.items()]
    outputs = [helper.make_tensor_value_info(name, onnx_type(storage), [*x.shape[:3], width])
               for name, (storage, width) in codec.arrays.items()]  # fmt: skip
    node = helper.make_node(function.name, ["x", *codec.constants], [*codec.arrays], domain=ONNX_DOMAIN)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(ONNX_DOMAIN, 1)]
    graph = helper.make_graph([node], "g", inputs, outputs)
    model = helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    constants = {} if static is None else codec.constant_values(KVScales(layers=({Side.KEY: static},)), 0)
    bound = {"x": np.ascontiguousarray(x.astype(FLOATS[compute])), **constants}
    session = GraphSession(Path("quantize.onnx"), 1, model=model)
    for input_name, values in bound.items():
        session.bind_input(input_name, values)
    stored = [session.output(name, (*x.shape[:3], width), storage.numpy) for name, (storage, width) in codec.arrays.items()]
    session.run()
    return stored


def scales_of(form: Format, heads: int, head_dim: int) -> SideScales | None:
    count = form.static_scales(heads, head_dim)
    if not count:
        return None
    amax = np.linspace(2.0, 3.0, count)
    step = amax / form.largest if form.symmetric else 1.8 * amax / form.code.levels
    return SideScales(scale=tuple(step), zero=None if form.symmetric else tuple(-amax))


FORMATS = [
    form for form in fitting(EVERY_FORMAT, 64)
    if form.group_size in (None, 16) and form.scale != "uncalibrated" and form.rotation != "hadamard_64"
]  # fmt: skip
TURBOQUANT = Format(dtype="int4", granularity="per_token", symmetric=False, scale="dynamic", arithmetic="vllm_turboquant")


def assert_stores_what_the_reference_stores(form: Format, compute: ComputeDType = "float32", head_dim: int = 64) -> None:
    """Compare bit for bit. Rotations may change 0.2 % of bytes: the order of a sum may move a value to another code."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 40, head_dim)).astype(np.float32) * np.exp2(rng.integers(-9, 4, (2, 3, 40, 1)))
    x[0, 0, :3] = [[0.0], [7.25], [-3e-6]]
    x[0, 1, 0, 5] = 5000.0
    x = x.astype(FLOATS[compute])
    static = scales_of(form, 3, head_dim)
    stored = quantize(x, form, static, compute)
    shared = None if static is None else reference.static_scales(static, form, 3, head_dim)
    expected = reference.quantize(torch.from_numpy(x.astype(np.float32)), form, shared)
    tensors = [t for t in (expected.codes, expected.scale, expected.zero) if t is not None]
    for array, tensor in zip(stored, tensors, strict=True):
        raw = tensor.contiguous().view(torch.uint8).numpy()
        equal = array.view(np.uint8) == raw
        assert equal.mean() > 0.998 if form.rotation != "none" else equal.all()


NIBBLES = [
    Format(dtype="int4", granularity="per_group", group_size=32, symmetric=symmetric, scale="dynamic")
    for symmetric in (True, False)
]


@pytest.mark.parametrize("form", [*FORMATS, TURBOQUANT, *NIBBLES], ids=name)
def test_a_format_stores_the_codes_of_the_reference_engine(form: Format) -> None:
    """96 channels in groups of 32: the middle group lies in low and in high nibbles."""
    assert_stores_what_the_reference_stores(form, head_dim=96 if form in NIBBLES else 64)


@pytest.mark.parametrize("form", [*FORMATS[::3], TURBOQUANT], ids=name)
def test_bfloat16_numbers_are_rounded_once_for_storage(form: Format) -> None:
    assert_stores_what_the_reference_stores(form, "bfloat16")


@pytest.mark.parametrize("tokens", [3, 1], ids=["prefill", "decode"])
def test_bfloat16_attention_is_float32_rounded_once(tokens: int) -> None:
    """ONNX Runtime supports only casts for bfloat16, so it runs the whole function only if nothing else is bfloat16."""
    policy = KVPolicy(
        name="aged",
        key=Format(dtype="int8", granularity="per_token", scale="dynamic", symmetric=False),
        value=Format(dtype="int4", granularity="per_group", group_size=16, scale="dynamic"),
        sink_tokens=4,
        recent_tokens=8,
    )
    rounded = AttentionCase(policy, Heads(4, 2, 64), (100, 70), "bfloat16", tokens)
    exact = AttentionCase(policy, Heads(4, 2, 64), (100, 70), "float32", tokens)
    exact.inputs |= {name: rounded.inputs[name].astype(np.float32) for name in ("query", "key", "value")}
    attended = exact.session(native=False).run()
    assert attended.any()
    output = rounded.session(native=False).run()
    np.testing.assert_array_equal(output.astype(np.float32), attended.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("compute", ["float32", "float16"])
@pytest.mark.parametrize(("dtype", "limit", "peer"),
                         [("fp8_e4m3", 448, ml_dtypes.float8_e4m3fn), ("fp8_e5m2", 57344, ml_dtypes.float8_e5m2)])  # fmt: skip
def test_fp8_rounds_every_float16_as_ml_dtypes_and_saturates(
    dtype: str, limit: float, peer: type, compute: Literal["float32", "float16"]
) -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)].astype(np.float32)
    x = np.concatenate([finite, np.zeros(-len(finite) % 64, np.float32)]).reshape(1, 1, -1, 64)
    form = Format(dtype=dtype, granularity="per_tensor", scale="uncalibrated")
    expected = np.clip(x, -limit, limit).astype(peer).view(np.uint8)
    np.testing.assert_array_equal(quantize(x, form, UNIT, compute)[0], expected)
    eager = reference.quantize(torch.from_numpy(x[0]), form, Static(torch.ones(1, 1, 1), None))
    np.testing.assert_array_equal(eager.codes.view(torch.uint8).numpy(), expected[0])


@pytest.mark.parametrize(
    ("factors", "outputs", "operators"),
    [
        ("x r", "z", ["Div"]),
        ("r x", "z", ["Div"]),
        ("r r", "z", ["Reciprocal", "Mul"]),
        ("r s", "z", ["Reciprocal", "Reciprocal", "Mul"]),
        ("x r", "z r", ["Reciprocal", "Div"]),
    ],
)
def test_a_product_with_a_reciprocal_becomes_an_equal_division(factors: str, outputs: str, operators: list[str]) -> None:
    nodes = [helper.make_node("Reciprocal", ["y"], ["r"]), helper.make_node("Reciprocal", ["x"], ["s"])]
    nodes = [*nodes[: 1 + ("s" in factors)], helper.make_node("Mul", factors.split(), ["z"])]
    x, y = (helper.make_tensor_value_info(name, FLOAT, [2]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x, y], [helper.make_tensor_value_info(name, FLOAT, [2]) for name in outputs.split()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    inputs = {"x": np.array([3.0, 4.0], np.float32), "y": np.array([2.0, 8.0], np.float32)}
    before = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
    _restore_division(model.graph)
    assert [node.op_type for node in model.graph.node] == operators
    for expected, actual in zip(before, onnx.reference.ReferenceEvaluator(model).run(None, inputs), strict=True):
        np.testing.assert_allclose(actual, expected)
