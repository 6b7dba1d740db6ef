"""NVIDIA ModelOpt's fake quantization as an independent check of the reference engine.

The inputs are real keys and values of the tiny model (a fifth larger than in calibration, so that some saturate), and the
logits of forced decode. With equal scales, equal numbers must result. Allowed differences:
- ModelOpt multiplies by limit / amax; the contract divides by amax / limit. Without a crossed tie, the difference is 2^-22 of a
  vector's largest number, or 2^-21 through a rotation (CLOSE allows twice that). A tie is crossed if a quotient lies on it to
  within float32's 2^-24: for int8 about one number in 10^5 (TIES).
- ModelOpt's own dynamic scales are float32, but the cache's are rounded to float16. Logits then differ by less than half of the
  format's own effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints.modelopt import FP8_UNCALIBRATED, cache_states, quantized_model, token_ids
from helpers.engines.random_llama import FP8, fmt
from helpers.policies.formats import name
from helpers.policies.shipped import SHIPPED
from torch import Tensor

from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.exports import UNIFIED_HF_KV, export_refusal
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.formats import dequantize, hadamard, quantize, static_scales
from stages.policies.arithmetic_torch import Static, Stored
from stages.policies.formats import Format, Rotation
from stages.policies.policy import FP16_POLICY, SIDES, KVPolicy, Side
from stages.quantize.recipe import quantizer_name
from stages.quantize.run import load_model

NVFP4 = SHIPPED["nvfp4"].key

CLOSE = 2.0**-20
TIES = 1e-5

STATIC = [
    FP8,
    FP8_UNCALIBRATED,
    fmt("int8", "per_tensor"),
    fmt("fp8_e4m3", "per_head"),
    fmt("int4", "per_channel"),
    fmt("int8", "per_head", rotation="hadamard"),
]
DYNAMIC = [
    fmt("fp8_e4m3", "per_token"),
    fmt("int8", "per_token"),
    fmt("int4", "per_token"),
    fmt("int4", "per_token", rotation="hadamard"),
]


@dataclass(frozen=True)
class Both:
    """One side of one layer, rounded by ModelOpt or by the reference engine."""

    quantizer: Any
    form: Format
    static: Static | None

    def modelopt(self, x_HTD: Tensor) -> Tensor:
        rounded: Tensor = self.quantizer(x_HTD[None])[0]
        return rounded

    def modelopt_with_stored_scales(self, x_HTD: Tensor) -> Tensor:
        """Round with a dynamic quantizer that uses the cache's float16 scales instead of its own."""
        scale = quantize(x_HTD, self.form, None).scale
        assert scale is not None
        self.quantizer.register_buffer("_amax", scale.float()[None] * self.form.code.limit)
        try:
            return self.modelopt(x_HTD)
        finally:
            del self.quantizer._amax

    def reference(self, x_HTD: Tensor) -> Tensor:
        return dequantize(quantize(x_HTD, self.form, self.static), self.form, self.static)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Any:
    return load_model(inspect_checkpoint(tiny_checkpoint))


@pytest.fixture(scope="module")
def states(model: Any, tiny_checkpoint: Path) -> list[dict[Side, Tensor]]:
    """Keys and values by layer and side, (heads, tokens, channels)."""
    return [{side: 1.2 * x for side, x in layer.items()} for layer in cache_states(model, tiny_checkpoint)]


@pytest.fixture(scope="module")
def tokens(tiny_checkpoint: Path) -> list[int]:
    ids = torch.cat([ids[0] for ids in token_ids(tiny_checkpoint)]).tolist()
    return (ids * 2)[:200]


class Judged:
    """A policy with one format for all caches, calibrated and rounded by ModelOpt, and its reference engine."""

    def __init__(self, form: Format, model: Any, checkpoint: Path) -> None:
        self.policy = KVPolicy(name="judged", key=form, value=form)
        self.fake, self.scales = quantized_model(checkpoint, self.policy)
        self.model = model
        self.form = form

    def both(self, layer: int, side: Side) -> Both:
        scales = static_scales(self.scales.layers[layer][side], self.form, 2, 64) if self.form.static else None
        return Both(self.fake.get_submodule(quantizer_name((layer, side))), self.form, scales)

    def logits(self, tokens: Sequence[int], way: str = "reference") -> np.ndarray:
        """Force-decode the last 136 tokens with the reference engine; `way` names the method of Both that rounds."""
        engine = TorchEngine.from_model(self.model, self.policy, self.scales)
        if way != "reference":
            storages: Any = [{side: Rounds(self.both(layer, side), way) for side in SIDES} for layer in range(4)]
            engine.storages = storages
        return engine.forced(tokens, 64)


@dataclass(frozen=True)
class Rounds:
    """A replacement of stages.engines.reference.cache.Storage."""

    both: Both
    way: str

    def write(self, x_HTD: Tensor) -> Stored:
        return Stored(getattr(self.both, self.way)(x_HTD), None, None)

    def read(self, stored: Stored) -> Tensor:
        return stored.codes


def share_that_differs(mine: Tensor, theirs: Tensor, x_HTD: Tensor) -> float:
    """Return the share of numbers that differ by more than CLOSE of their vector's largest number."""
    return float(((mine - theirs).abs() > CLOSE * x_HTD.abs().amax(-1, keepdim=True)).float().mean())


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_nvfp4_is_bit_for_bit_the_packing_of_modelopt(
    rotation: Rotation, model: Any, states: list[dict[Side, Tensor]], tiny_checkpoint: Path
) -> None:
    """ModelOpt rounds an NVFP4 cache only on a GPU. Its packing of weights runs anywhere and uses the same arithmetic."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    form = NVFP4.model_copy(update={"rotation": rotation})
    judged = Judged(form, model, tiny_checkpoint)
    for layer in range(4):
        for side in SIDES:
            x, static = states[layer][side], static_scales(judged.scales.layers[layer][side], form, 2, 64)
            mine = dequantize(quantize(x, form, static), form, static)
            turned = x @ hadamard(64) if rotation == "hadamard" else x.clone()
            packed, scales, layer_scale = NVFP4QTensor.quantize(turned, 16, None, static.scale.flatten()[0])
            theirs = packed.dequantize(torch.float32, scale=scales, double_scale=layer_scale, block_sizes={-1: 16})
            theirs = theirs @ hadamard(64) if rotation == "hadamard" else theirs
            assert torch.equal(mine, theirs), (layer, side)
            assert (mine != x).float().mean() > 0.5


def test_modelopt_exports_nvfp4_with_six_times_the_scale_that_its_quantizer_takes() -> None:
    """Show why kvgate writes no NVFP4 export: auto-round and the quantizer itself divide amax by 6 * 448."""
    from modelopt.torch.export.quant_utils import postprocess_state_dict

    name = "model.layers.0.self_attn.k_bmm_quantizer._amax"
    ((exported, scale),) = postprocess_state_dict({name: torch.tensor(21.0)}, 448, "NVFP4").items()
    assert exported == "model.layers.0.self_attn.k_proj.k_scale"
    assert scale.item() == pytest.approx(21 / 448)
    assert scale.item() == pytest.approx(6 * 21 / NVFP4.largest)
    policy = KVPolicy(name="nvfp4", key=NVFP4, value=NVFP4)
    assert "a factor of 6" in str(export_refusal(policy, UNIFIED_HF_KV))


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("form", STATIC + DYNAMIC, ids=name)
def test_modelopt_and_the_reference_round_alike(
    form: Format, model: Any, states: list[dict[Side, Tensor]], tokens: list[int], tiny_checkpoint: Path
) -> None:
    """Compare numbers, then logits.

    Logits may differ by 5 % of the format's own effect, for occasional ties (one INT8 key with the other code makes 0.4 %;
    without ties, logits agree to 1e-4), and by half of it with ModelOpt's own dynamic scales.
    """
    judged = Judged(form, model, tiny_checkpoint)
    way = "modelopt" if form.static else "modelopt_with_stored_scales"
    with torch.no_grad():
        for layer in range(4):
            for side in SIDES:
                x, both = states[layer][side], judged.both(layer, side)
                theirs = getattr(both, way)(x)
                assert share_that_differs(both.reference(x), theirs, x) <= TIES, (layer, side)
                assert share_that_differs(x, theirs, x) > 0.5
        reference, witness = judged.logits(tokens), judged.logits(tokens, way)
        exact = TorchEngine.from_model(model, FP16_POLICY).forced(tokens, 64)
        own = judged.logits(tokens, "modelopt")
    assert rms(reference - witness) < 0.05 * rms(reference - exact)
    assert rms(reference - own) < 0.5 * rms(reference - exact)
