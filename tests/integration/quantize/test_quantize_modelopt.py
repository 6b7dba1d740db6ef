"""The quantize stage with the real ModelOpt, on the trained tiny model and on random models of the other families."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.checkpoints.modelopt import random_checkpoint, stage, token_ids
from helpers.policies.shipped import SHIPPED
from helpers.stride import STRIDE
from safetensors import safe_open
from safetensors.torch import load_file

from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.files import INDEX
from stages.core.files import STORE_FILE
from stages.core.records import no_progress
from stages.policies.formats import WeightsFormat
from stages.policies.scales import SCALES_FILE, KVScales
from stages.quantize.export import declare_unified_hf, export
from stages.quantize.recipe import NOTHING, quantizer_name
from stages.quantize.run import load_model, quantized_model

FACTS = json.loads((Path(__file__).parents[2] / "contract" / "facts" / "engine-1.2.1.json").read_text(encoding="utf-8"))
"""Facts recorded from TensorRT-LLM's sources."""
QUANTIZED: list[WeightsFormat] = ["fp8", "int8_sq", "int4_awq"] if STRIDE == 1 else ["fp8", "int8_sq"]
"""Formats of quantized weights. ModelOpt searches the scales of AWQ, which takes long."""


@pytest.fixture(scope="module")
def run_stage(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, WeightsFormat], Path]:
    """A function that returns the stage's output on the tiny model by policy and weight format. Each runs once."""
    outputs: dict[tuple[str, WeightsFormat], Path] = {}

    def run(policy: str, weights: WeightsFormat = "none") -> Path:
        if (policy, weights) not in outputs:
            outputs[policy, weights] = tmp_path_factory.mktemp(f"{policy}_{weights}")
            stage(tiny_checkpoint, outputs[policy, weights], policy, weights)
        return outputs[policy, weights]

    return run


def test_the_exports_have_everything_that_tensorrt_llm_reads(tiny_checkpoint: Path, run_stage: Callable[..., Path]) -> None:
    """The unquantized weights byte by byte, the tokenizer, and the rotary base at the top level."""
    out = run_stage("fp8")
    assert all(path.read_bytes() == (tiny_checkpoint / path.name).read_bytes() for path in (out / "checkpoint").iterdir())
    base = json.loads((out / "checkpoint" / "config.json").read_text())["rope_theta"]
    unified = json.loads((out / "exports" / "unified_hf" / "config.json").read_text())
    assert (unified["rope_theta"], unified["rope_scaling"]) == (base, None)
    assert "rope_parameters" not in unified
    assert (out / "exports" / "unified_hf" / "tokenizer.json").is_file()
    assert json.loads((out / "exports" / "tensorrt_llm" / "config.json").read_text())["rotary_base"] == base


BITS: dict[str, dict[str, Any]] = {"fp8": {"num_bits": (4, 3)}, "int8_tensor": {"num_bits": 8, "narrow_range": True}}
"""ModelOpt's attributes of a cache's quantizers."""


@pytest.mark.parametrize("kv", BITS)
def test_a_cache_is_declared_as_modelopt_declares_it(
    kv: str, tiny_checkpoint: Path, run_stage: Callable[[str], Path], tmp_path: Path
) -> None:
    """ModelOpt's exporters write the same files for a model that has calibrated quantizers of the cache."""
    from stages.quantize import modelopt_adapter as adapter

    out, model = run_stage(kv), load_model(inspect_checkpoint(tiny_checkpoint))
    adapter.quantize_model(model, NOTHING, None)
    for layer, sides in enumerate(KVScales.model_validate_json((out / SCALES_FILE).read_bytes()).layers):
        for side, static in sides.items():
            quantizer: Any = model.get_submodule(quantizer_name((layer, side)))
            quantizer.set_from_attribute_config({**BITS[kv], "axis": None, "enable": True})
            quantizer.amax = torch.tensor(static.scale[0] * SHIPPED[kv].key.largest)
    adapter.cast_for_export(model, torch.float16)
    adapter.export_tensorrt_llm(copy.deepcopy(model), tmp_path / "tensorrt_llm", torch.float16)
    if kv == "fp8":
        adapter.export_unified_hf(model, tmp_path / "unified_hf")
    reasons = json.loads((out / "exports" / "exports.json").read_text())
    assert (reasons["tensorrt_llm"], "int8" in str(reasons["unified_hf"])) == (None, kv == "int8_tensor")
    assert (out / "exports" / "unified_hf").exists() == (kv == "fp8")
    for theirs in tmp_path.glob("*/*"):
        ours = out / "exports" / theirs.relative_to(tmp_path)
        if theirs.suffix == ".safetensors":
            expected, written = load_file(theirs), load_file(ours)
            assert written.keys() == expected.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(written[name], tensor, rtol=1e-6, atol=0)
        elif theirs.name != "generation_config.json":
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text())


def test_scales_join_the_index_of_a_sharded_export(run_stage: Callable[[str], Path], tmp_path: Path) -> None:
    static = KVScales.model_validate_json((run_stage("fp8") / SCALES_FILE).read_bytes())
    model = transformers.AutoModelForCausalLM.from_pretrained(run_stage("fp8") / "checkpoint")
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    declare_unified_hf(tmp_path, SHIPPED["fp8"], static)
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    stored = {name: file.name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert stored == places
    assert sum(name.endswith(("k_scale", "v_scale")) for name in places) == 2 * 4


def test_an_export_for_two_gpus_is_split(tiny_checkpoint: Path, run_stage: Callable[..., Path], tmp_path: Path) -> None:
    out, policy = run_stage("fp8"), SHIPPED["fp8"]
    export(tiny_checkpoint, out, out / SCALES_FILE, tmp_path, weights="none", policy=policy, ranks=2, progress=no_progress)
    whole, *halves = (
        load_file(folder / "tensorrt_llm" / f"rank{rank}.safetensors")
        for folder, rank in ((out / "exports", 0), (tmp_path, 0), (tmp_path, 1))
    )
    assert torch.equal(torch.cat([half["lm_head.weight"] for half in halves]), whole["lm_head.weight"])
    assert all(half.keys() == whole.keys() for half in halves)
    assert json.loads((tmp_path / "tensorrt_llm" / "config.json").read_text())["mapping"]["tp_size"] == 2


def other_codes(out: Path) -> int:
    """Count the FP8 weights of the unified export that have another code than in `checkpoint/`.

    Codes are 2^-4 apart; float16 numbers are 2^-11 apart.
    """
    unified, judged = (load_file(out / folder / "model.safetensors") for folder in ("exports/unified_hf", "checkpoint"))
    scaled = [name.removesuffix("_scale") for name in unified if name.endswith(".weight_scale")]
    assert scaled
    count = 0
    for name in scaled:
        expected = judged[name].float()
        value = unified[name].float() * unified[f"{name}_scale"]
        count += int(((value - expected).abs() > 2.0**-11 * expected.abs() + 2.0**-25).sum())
    return count


FUSED = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}


def effective(tensors: dict[str, torch.Tensor], base: str, weights: str) -> torch.Tensor:
    """Return W (out, in) such that W x is the layer's result if activations are not rounded."""
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


@pytest.mark.every
@pytest.mark.parametrize("weights", ["none", *QUANTIZED])
def test_the_tensorrt_llm_export_has_the_judged_weights(
    weights: WeightsFormat, run_stage: Callable[[str, WeightsFormat], Path]
) -> None:
    """A dequantized weight may differ from the float16 in `checkpoint/` by half a unit of float16.

    The format follows TensorRT-LLM 1.2.1 (tensorrt_llm/models/modeling_utils.py and quantization/layers.py): qkv contains
    the rows of q, k and v, fc is gate_proj, gate is up_proj; INT4 codes are transposed, two outputs per byte, low bits
    first.
    """
    out = run_stage("fp8", weights)
    assert json.loads((out / "exports" / "exports.json").read_text()) == {"tensorrt_llm": None, "unified_hf": None}
    with safe_open(out / "exports" / "unified_hf" / "model.safetensors", framework="np") as exported:
        packed = exported.get_slice("model.layers.0.mlp.up_proj.weight").get_dtype()
    assert packed == {"none": "F16", "fp8": "F8_E4M3", "int8_sq": "I8", "int4_awq": "U8"}[weights]
    tensors = load_file(out / "exports" / "tensorrt_llm" / "rank0.safetensors")
    judged = load_file(out / "checkpoint" / "model.safetensors")
    if weights == "none":
        assert {re.sub(r"layers\.\d+\.", "layers.{layer}.", name) for name in tensors} <= set(FACTS["tensors"]["names"])
    for layer in range(4):
        for name, parts in FUSED.items():
            expected = torch.cat([judged[f"model.layers.{layer}.{part}.weight"].float() for part in parts])
            exported_weight = effective(tensors, f"transformer.layers.{layer}.{name}", weights)
            other = (exported_weight - expected).abs() > 2.0**-11 * expected.abs() + 2.0**-25
            # A weight halfway between two codes may get either: ModelOpt multiplies, but its exporter divides.
            allowed = 0.0 if weights in ("none", "fp8") else 1e-3
            assert other.float().mean() <= allowed, f"layer {layer} {name}: {int(other.sum())} weights differ"
            assert (exported_weight - expected).norm() <= 5e-3 * expected.norm()
    for name, source in (("vocab_embedding", "embed_tokens"), ("ln_f", "norm")):
        assert torch.equal(tensors[f"transformer.{name}.weight"].float(), judged[f"model.{source}.weight"].float())


@pytest.mark.every
@pytest.mark.parametrize("weights", QUANTIZED)
def test_the_checkpoint_equals_modelopt_without_input_rounding(
    weights: WeightsFormat, tiny_checkpoint: Path, run_stage: Callable[..., Path]
) -> None:
    """Tolerance: 1 % of the logits' standard deviation, for the float16 rounding of the stored weights (2^-11 each)."""
    from stages.quantize.modelopt_adapter import enabled_quantizers

    samples = [ids[0].tolist() for ids in token_ids(tiny_checkpoint)]
    model = quantized_model(inspect_checkpoint(tiny_checkpoint), weights, samples, 0, no_progress).float()
    for name, quantizer in enabled_quantizers(model):
        if name.endswith("input_quantizer"):
            quantizer.disable()
    checkpoint = run_stage("fp8", weights) / "checkpoint"
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    source = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    ids = token_ids(tiny_checkpoint)[1]
    with torch.no_grad():
        fake, folded, original = (m(input_ids=ids, use_cache=False).logits for m in (model, plain, source))
    assert (fake - folded).abs().max() < 0.01 * fake.std()
    # The bound is meaningful: the quantization itself moves the logits further.
    assert (original - folded).abs().max() > 0.02 * fake.std()
    assert transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").dtype is torch.float16


def test_shards_and_their_index_survive_dequantization(tiny_checkpoint: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype="auto")
    model.save_pretrained(sharded, max_shard_size="1MB")
    for file in tiny_checkpoint.glob("*token*.json"):
        (sharded / file.name).write_bytes(file.read_bytes())
    (tmp_path / STORE_FILE).write_text("{}")
    stage(sharded, tmp_path, "fp16", "fp8")
    out = tmp_path / "checkpoint"
    assert not (out / INDEX).samefile(sharded / INDEX), "it is rewritten, so it must not be a link to the user's file"
    index = json.loads((out / INDEX).read_text())
    assert set(index["weight_map"].values()) == {path.name for path in out.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) > 1
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not loading["missing_keys"]


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_every_family_gets_its_quantizers_and_exports(family: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The weights are random bfloat16 numbers. The unified export holds every scale and an unquantized embedding.

    `check_enabled` compares the quantizers.
    """
    stage(random_checkpoint(family, tiny_checkpoint, tmp_path / "model"), tmp_path, "fp8", "fp8")
    exports = json.loads((tmp_path / "exports" / "exports.json").read_text())
    assert exports["unified_hf"] is None
    assert (exports["tensorrt_llm"] is None) == (family == "mistral")
    with safe_open(tmp_path / "exports" / "unified_hf" / "model.safetensors", framework="pt") as exported:
        assert exported.get_tensor("model.embed_tokens.weight").dtype is torch.bfloat16
    assert other_codes(tmp_path) == 0
