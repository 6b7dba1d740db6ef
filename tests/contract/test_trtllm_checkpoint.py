"""What trtllm-build would be given is what was judged: the export's codes, dequantized, are the weights of `checkpoint/`.

The oracle loads `checkpoint/`, which holds the quantized weights in the source's dtype, float16 here; the export holds codes
and scales. A dequantized weight may therefore differ by half a unit of float16, 2^-11 relative, and no more.

The format is read as TensorRT-LLM 1.2.1 reads it (tensorrt_llm/models/modeling_utils.py and quantization/layers.py): qkv is the
rows of q, k and v, fc is gate_proj, gate is up_proj; INT4 codes lie transposed, two outputs a byte, the low bits first.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize_fixtures import stage
from safetensors.torch import load_file

FORMATS = {"none": "fp8", "fp8": "int8_tensor", "int8_sq": "fp8", "int4_awq": "int8_tensor"}
"""Weights with the cache they are tried with: the one does not depend on the other."""
FACTS = json.loads(Path(__file__).with_name("facts").joinpath("engine-1.2.1.json").read_text(encoding="utf-8"))
HALF_UNIT = 2.0**-11
FUSED = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}


def effective(tensors: dict[str, torch.Tensor], base: str, weights: str) -> torch.Tensor:
    """Return W (out, in) such that W x is what the layer computes when it does not round activations."""
    codes = tensors[f"{base}.weight"]
    if weights == "none":
        return codes.float()
    scale = tensors[f"{base}.weights_scaling_factor"].float()
    if weights == "fp8":
        return codes.view(torch.float8_e4m3fn).float() * scale
    if weights == "int4_awq":
        packed = codes.T
        codes = torch.stack(((packed << 4) >> 4, packed >> 4), -1).flatten(1).T
        scale = scale.reshape(len(codes), -1)
        scale = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    else:
        scale = scale[:, None]
    return codes.float() * scale * tensors[f"{base}.prequant_scaling_factor"].float()


@pytest.mark.parametrize("weights", FORMATS)
def test_every_weight_of_the_export_is_the_one_that_is_judged(weights: Any, tiny_checkpoint: Path, tmp_path: Path) -> None:
    stage(tiny_checkpoint, tmp_path, FORMATS[weights], weights)
    tensors = load_file(tmp_path / "exports" / "tensorrt_llm" / "rank0.safetensors")
    judged = load_file(tmp_path / "checkpoint" / "model.safetensors")
    if weights == "none":
        assert {re.sub(r"layers\.\d+\.", "layers.{layer}.", name) for name in tensors} <= set(FACTS["tensors"]["names"])
    for layer in range(4):
        for name, parts in FUSED.items():
            expected = torch.cat([judged[f"model.layers.{layer}.{part}.weight"].float() for part in parts])
            found = effective(tensors, f"transformer.layers.{layer}.{name}", weights)
            other = (found - expected).abs() > HALF_UNIT * expected.abs() + 2.0**-25
            # a weight halfway between two codes may go to either: ModelOpt multiplies where its exporter divides
            allowed = 0.0 if weights in ("none", "fp8") else 1e-3
            assert other.float().mean() <= allowed, f"layer {layer} {name}: {int(other.sum())} weights differ"
            assert (found - expected).norm() <= 5e-3 * expected.norm()
    for name, source in (("vocab_embedding", "embed_tokens"), ("ln_f", "norm")):
        assert torch.equal(tensors[f"transformer.{name}.weight"].float(), judged[f"model.{source}.weight"].float())
