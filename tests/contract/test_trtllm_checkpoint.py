"""What trtllm-build would be given is what was judged: an independent reader of the checkpoint that ModelOpt exported
reproduces the oracle's logits, and every fact that the builder relies on holds tensor by tensor.

The oracle loads `checkpoint/`, which holds the quantized weights in the source's dtype, float16 here; the export holds codes
and scales. A dequantized weight may therefore differ by half a unit of float16, 2^-11 relative, and no more.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize_fixtures import POLICIES, no_progress, quantized_model, stage, token_ids
from safetensors.torch import load_file
from trtllm_reader import Checkpoint, Linear

from pipeline.core.kv import Side
from pipeline.core.scales import KVScales
from stages.engines.oracle.build import build_bundle
from stages.engines.oracle.engine import load_engine

FORMATS = {"none": "fp8", "fp8": "int8_tensor", "int8_sq": "fp8", "int4_awq": "int8_tensor"}
"""Weights with the cache they are tried with: the one does not depend on the other."""
ALGORITHMS = {"none": None, "fp8": "FP8", "int8_sq": "W8A8_SQ_PER_CHANNEL", "int4_awq": "W4A16_AWQ"}
HALF_UNIT = 2.0**-11
FUSED = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
FIRST = 24
"""Tokens of the prefill; the others are decoded from the cache."""


@pytest.fixture(scope="module", params=FORMATS)
def weights(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def quantized(tiny_checkpoint: Path, weights: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the quantize stage left for these weights."""
    out = tmp_path_factory.mktemp(weights)
    stage(tiny_checkpoint, out, FORMATS[weights], weights)
    return out


@pytest.fixture(scope="module")
def checkpoint(quantized: Path) -> Checkpoint:
    return Checkpoint(quantized / "exports" / "tensorrt_llm")


def tokens(checkpoint: Path) -> list[int]:
    """A calibration text: nothing in it is beyond a calibrated maximum."""
    return [int(i) for i in token_ids(checkpoint)[1][0]]


def effective(linear: Linear) -> torch.Tensor:
    """W such that W x is what the layer computes when it does not round activations."""
    return linear.weight_OI if linear.prequant_I is None else linear.weight_OI * linear.prequant_I


def oracle_logits(quantized: Path, policy: str, scales: list[torch.Tensor | None], out: Path) -> torch.Tensor:
    """The oracle on `checkpoint/`, its keys and values with the export's shared scales."""
    shared = json.loads((quantized / "kv_scales.json").read_text())
    for layer, scale in zip(shared["layers"], scales, strict=True):
        for side in ("key", "value"):
            layer[side]["scale"] = [scale.item()] if scale is not None else layer[side]["scale"]
    (out / "scales.json").write_text(json.dumps(shared))
    (out / "bundle").mkdir()
    source, files = quantized / "checkpoint", out / "bundle"
    build_bundle(source, files, policy=POLICIES[policy], scales=out / "scales.json", progress=no_progress)
    return torch.from_numpy(load_engine(files, threads=1).forced(tokens(source), FIRST))


def test_every_weight_of_the_export_is_the_one_that_is_judged(checkpoint: Checkpoint, quantized: Path, weights: str) -> None:
    judged = load_file(quantized / "checkpoint" / "model.safetensors")
    assert checkpoint.algorithm == ALGORITHMS[weights]
    for layer, linears in enumerate(checkpoint.linears):
        for name, linear in linears.items():
            parts = [judged[f"model.layers.{layer}.{part}.weight"].float() for part in FUSED[name]]
            found, expected = effective(linear), torch.cat(parts)
            other = (found - expected).abs() > HALF_UNIT * expected.abs() + 2.0**-25
            # a weight halfway between two codes may go to either: ModelOpt multiplies where its exporter divides
            allowed = 0.0 if weights in ("none", "fp8") else 1e-3
            assert other.float().mean() <= allowed, f"layer {layer} {name}: {int(other.sum())} weights differ"
            assert (found - expected).norm() <= 5e-3 * expected.norm()
    for name, tensor in (("embed_tokens", checkpoint.embedding), ("norm", checkpoint.ln_f)):
        assert torch.equal(tensor, judged[f"model.{name}.weight"].float())


def test_the_readers_decoder_gives_the_oracles_logits_from_a_quantized_cache(
    checkpoint: Checkpoint, quantized: Path, weights: str, tmp_path: Path
) -> None:
    expected = oracle_logits(quantized, FORMATS[weights], checkpoint.kv_scales, tmp_path)
    ids = tokens(quantized / "checkpoint")
    found = checkpoint.forced(ids, FIRST, round_activations=False)[FIRST:]
    assert kl(expected, found).mean() < 0.01, "the same decoder up to half a unit of float16 in its weights"
    # With that half unit taken as the checkpoint has it, nothing is left but the order of float32 sums. It differs between
    # processors, and a value between two FP8 codes may fall to either of them.
    judged = load_file(quantized / "checkpoint" / "model.safetensors")
    for layer, linears in enumerate(checkpoint.linears):
        for name, linear in linears.items():
            parts = [judged[f"model.layers.{layer}.{part}.weight"].float() for part in FUSED[name]]
            linears[name] = replace(linear, weight_OI=torch.cat(parts), prequant_I=None)
    try:
        found = checkpoint.forced(ids, FIRST, round_activations=False)[FIRST:]
        assert kl(expected, found).mean() < 1e-6
        assert torch.allclose(found, expected, atol=2e-2), f"{(found - expected).abs().max()}"
    finally:
        checkpoint.linears = Checkpoint(quantized / "exports" / "tensorrt_llm").linears


def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    p, q = one.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def test_cache_scales_are_shared_by_keys_and_values_and_fp8_never_has_one_below_1(
    checkpoint: Checkpoint, quantized: Path, weights: str
) -> None:
    measured = KVScales.model_validate_json((quantized / "kv_scales.json").read_text())
    floor = 1.0 if FORMATS[weights] == "fp8" else 0.0
    assert checkpoint.kv_algorithm == ("FP8" if floor else "INT8")
    for layer, (scale, sides) in enumerate(zip(checkpoint.kv_scales, measured.layers, strict=True)):
        key, value = sides[Side.KEY].scale[0], sides[Side.VALUE].scale[0]
        assert scale is not None
        assert float(scale) == pytest.approx(max(key, value, floor), rel=1e-6), f"layer {layer}"
    if floor:  # why a policy with calibrated FP8 scales is not what TensorRT-LLM runs
        assert any(sides[Side.VALUE].scale[0] < 1 for sides in measured.layers)


def test_with_rounded_activations_the_reader_gives_what_modelopts_own_quantizers_give(
    checkpoint: Checkpoint, quantized: Path, tiny_checkpoint: Path, weights: str
) -> None:
    """A prefill, which no quantized cache takes part in; the oracle leaves activations alone, so ModelOpt is the witness."""
    ids = tokens(quantized / "checkpoint")
    found = checkpoint.forced(ids, len(ids))
    unrounded = checkpoint.forced(ids, len(ids), round_activations=False)
    if weights in ("none", "int4_awq"):
        assert torch.equal(found, unrounded), "these round no activations"
        return
    model, _ = quantized_model(tiny_checkpoint, POLICIES["fp16"], weights)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    assert kl(expected, found).mean() < 0.25 * kl(expected, unrounded).mean(), "the rounding is what makes them agree"
