"""Static scales against extremes from transformers' own cache, without ModelOpt, and bypassed quantizers.

The tolerance is 1e-5, except for rotations, which add 64 products in another order.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.checkpoints.modelopt import stage, token_ids
from helpers.engines.random_llama import FP8, fmt
from helpers.policies.shipped import SHIPPED
from torch import Tensor

from stages.checkpoints.description import inspect_checkpoint
from stages.core.errors import UserError
from stages.policies.formats import Format
from stages.policies.policy import SIDES, KVPolicy, KVShape, LayerOverride, Side, Window
from stages.policies.scales import SCALES_FILE, KVScales, SideScales
from stages.quantize.run import load_model
from stages.quantize.scales import EXTREMES_FILE, Measured, read_extremes, static_scales

SHAPE = KVShape(layers=4, kv_heads=2, head_dim=64)
States = list[dict[str, Tensor]]
"""Keys and values by layer and side, (tokens of all texts, heads, channels)."""


def states_of(checkpoint: Path) -> States:
    """Return the keys (after the rotary embedding) and values of all calibration texts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        caches = [model(input_ids=ids, use_cache=True).past_key_values for ids in token_ids(checkpoint)]

    def joined(layer: int, side: Side) -> Tensor:
        return torch.cat([getattr(cache.layers[layer], f"{side}s")[0] for cache in caches], dim=1).transpose(0, 1)

    return [{side: joined(layer, side) for side in SIDES} for layer in range(SHAPE.layers)]


@pytest.fixture(scope="module")
def states(tiny_checkpoint: Path) -> States:
    return states_of(tiny_checkpoint)


def walsh(states_THD: Tensor) -> Tensor:
    """Compute the Hadamard transform by its definition: element (i, j) is -1 to the number of bits that i and j share."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)]
    return states_THD @ (torch.tensor(signs, dtype=torch.float32) / 8)


def expected(states_THD: Tensor, form: Format) -> tuple[Tensor, Tensor | None]:
    """Return the flat scales and zero points of a calibrated format."""
    x = walsh(states_THD) if form.rotation == "hadamard" else states_THD
    parts = {"per_tensor": x.reshape(-1, 1), "per_head": x.transpose(1, 2).reshape(-1, 2), "per_channel": x.reshape(-1, 128)}
    low, high = parts[form.granularity].amin(0), parts[form.granularity].amax(0)
    if form.scale == "uncalibrated":
        return torch.ones(1), None
    if form.symmetric:
        limit = {"fp8_e4m3": 448, "fp8_e5m2": 57344, "int8": 127, "int4": 7}[form.dtype]
        return torch.maximum(-low, high) / limit, None
    return (high - low) / {"int8": 255, "int4": 15}[form.dtype], low


def check(scales: SideScales, states_THD: Tensor, form: Format) -> None:
    scale, zero = expected(states_THD, form)
    tolerance = 1e-5 if form.rotation == "none" else 1e-4
    torch.testing.assert_close(torch.tensor(scales.scale), scale, rtol=tolerance, atol=0.0)
    if zero is None:
        assert scales.zero is None
    else:
        assert scales.zero is not None
        torch.testing.assert_close(torch.tensor(scales.zero), zero, rtol=tolerance, atol=1e-5)


def check_all(scales: KVScales, states: States, policy: KVPolicy) -> None:
    """Check every static format. A window's copy is measured from the same states."""
    for layer, sides in enumerate(states):
        for side, form in policy.sides(layer).items():
            if form.static:
                check(scales.layers[layer][side], sides[side.removeprefix("window_")], form)


@pytest.fixture(scope="module")
def measured(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    out = tmp_path_factory.mktemp("measured")
    stage(tiny_checkpoint, out, "fp8")
    return read_extremes(out / "extremes" / EXTREMES_FILE)


def policy(key: Format, value: Format, window: Window | None = None, *overrides: LayerOverride) -> KVPolicy:
    return KVPolicy(name="test", key=key, value=value, window=window, overrides=overrides)


CHANNEL, HEAD, TOKEN = fmt("int8", "per_channel"), fmt("int8", "per_head", symmetric=False), fmt("int4", "per_token")
TENSOR, TURNED = fmt("int4", "per_tensor"), fmt("int8", "per_head", rotation="hadamard")
CASES = {
    "formats": policy(FP8, fmt("int4", "per_tensor", symmetric=False)),
    "uncalibrated": SHIPPED["fp8_uncalibrated"],
    "rotated": policy(fmt("int4", "per_head", rotation="hadamard"), fmt("int8", "per_channel", rotation="hadamard")),
    "rotated, with zero points": policy(
        fmt("fp8_e5m2", "per_head"), fmt("int8", "per_channel", rotation="hadamard", symmetric=False)
    ),
    "overrides": policy(FP8, TOKEN, None, LayerOverride(layers=(1,), key=CHANNEL), LayerOverride(layers=(1, 3), value=HEAD)),
    "other formats in a window": policy(
        TENSOR, TENSOR, Window(tokens=64, key=CHANNEL, value=TURNED), LayerOverride(layers=(2,), key=TOKEN)
    ),
    "scales in a window alone": policy(Format(dtype="fp16"), TOKEN, Window(tokens=64, key=CHANNEL, value=FP8)),
}


@pytest.mark.parametrize("policy", CASES.values(), ids=CASES)
def test_static_formats_have_the_extremes_of_shared_scales(
    policy: KVPolicy, states: States, measured: Measured, tiny_checkpoint: Path
) -> None:
    """`KVScales.check` compares the sides of each layer."""
    scales = static_scales(policy, SHAPE, measured, tiny_checkpoint)
    scales.check(policy, SHAPE, "static_scales")
    check_all(scales, states, policy)


def test_scales_belong_to_the_quantized_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    stage(tiny_checkpoint, tmp_path, "fp8_head", "fp8")
    scales = KVScales.model_validate_json((tmp_path / SCALES_FILE).read_bytes())
    check_all(scales, states_of(tmp_path / "checkpoint"), SHIPPED["fp8_head"])


@pytest.fixture
def adapter() -> Any:
    """ModelOpt's adapter, whose import takes seconds."""
    from stages.quantize import modelopt_adapter

    return modelopt_adapter


def test_missing_quantizers_are_an_error(adapter: Any, tiny_checkpoint: Path) -> None:
    """ModelOpt ignores names without a match, such as those of attention that it cannot hook, and leaves the cache exact."""
    model = load_model(inspect_checkpoint(tiny_checkpoint))
    with pytest.raises(RuntimeError, match=r"8 quantizers instead of 10: model.layers.4.self_attn.k_bmm_quantizer is missing"):
        adapter.measure_extremes(model, 5, lambda m: m(torch.tensor([[1, 2]])), tiny_checkpoint)


def test_a_quantizer_that_attention_bypasses_is_an_error(adapter: Any, tiny_checkpoint: Path) -> None:
    def keys_alone(model: Any) -> None:
        model.get_submodule("model.layers.0.self_attn.k_bmm_quantizer")(torch.ones(1, 2, 3, 64))

    with pytest.raises(RuntimeError, match=r"model.layers.0.self_attn.v_bmm_quantizer was never called"):
        adapter.measure_extremes(load_model(inspect_checkpoint(tiny_checkpoint)), 1, keys_alone, tiny_checkpoint)


def test_values_that_are_not_finite_are_named_by_layer_and_side(adapter: Any, tiny_checkpoint: Path) -> None:
    model = load_model(inspect_checkpoint(tiny_checkpoint))
    with torch.no_grad():
        model.get_submodule("model.layers.2.self_attn.v_proj").weight[0, 0] = float("nan")  # type: ignore[operator]
    with pytest.raises(UserError, match=r"model\.path=.*: the values of layer 2 are not finite on the calibration texts"):
        adapter.measure_extremes(model, 4, lambda m: m(torch.tensor([[1, 2]])), tiny_checkpoint)
