"""The quantize stage, step by step; `stages.quantize.quantize` is its light entrance."""

import json
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from pipeline.core.checkpoint import CheckpointInfo, inspect_checkpoint
from pipeline.core.errors import UserError
from pipeline.core.kv import POLICY_FILE, SCALES_FILE, KVPolicy, Side
from pipeline.core.records import Progress
from pipeline.core.weights import WeightsFormat
from stages.quantize import modelopt_adapter as adapter
from stages.quantize.export import export_all
from stages.quantize.materialize import copy_checkpoint, source_dtype, write_dequantized
from stages.quantize.recipe import LINEARS, cache_quantizers, check_enabled, expressed_by, measurements, weight_recipe
from stages.quantize.scales import Measured, static_scales
from stages.quantize.tokens import tokenize
from stages.workloads.prompts import load_tokenizer


def run(
    checkpoint: Path,
    out: Path,
    *,
    weights: WeightsFormat,
    policy: KVPolicy,
    calibration_texts: list[str],
    max_length: int,
    seed: int,
    progress: Progress,
) -> None:
    info = inspect_checkpoint(checkpoint)
    policy.check_shape(info.shape)
    layers = info.shape.layers
    samples = tokenize(load_tokenizer(checkpoint), calibration_texts, max_length, info.vocab_size)
    torch.manual_seed(seed)

    progress("loading the checkpoint", 0, 1)
    model = cached = load_model(info)
    progress("loading the checkpoint", 1, 1)
    # Weights first, the cache on the finished weights: AWQ's search would otherwise choose other weights for every KV
    # policy, and a candidate would differ from its baseline in more than the cache.
    linears = weight_recipe(weights, layers)
    if weights == "none":
        copy_checkpoint(info, out / "checkpoint")
    else:
        adapter.quantize_model(model, linears, _forward_loop("weights", samples, progress))
        # In the order of the exports, which fuse, cast and only then round: what is judged is what is shipped.
        adapter.fuse_shared_inputs(model, layers)
        adapter.cast_for_export(model, source_dtype(info))
        write_dequantized(info, out / "checkpoint", dequantized_weights(model, layers))
        cached = load_model(inspect_checkpoint(out / "checkpoint"))
    measured = measure(cached, info, policy, _forward_loop("cache", samples, progress))
    scales = static_scales(policy, info.shape, measured, info.path)
    caches = cache_quantizers(policy, info.shape, scales, backend=adapter.BACKEND_AVAILABLE)
    adapter.add_cache_quantizers(model, caches)
    enabled = adapter.enabled_attributes(model)
    check_enabled({**linears.expected, **{name: cache.attributes for name, cache in caches.items()}}, enabled)
    used = samples if weights != "none" or measured else []

    (out / POLICY_FILE).write_text(policy.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (out / SCALES_FILE).write_text(scales.model_dump_json(indent=1) + "\n", encoding="utf-8")
    report = {
        "modelopt": adapter.VERSION,
        "transformers": transformers.__version__,
        "weights": weights,
        "kv_policy": policy.name,
        "kv_expressed_by": [_expressed_by(policy, layer) for layer in range(layers)],
        "quantizers": {"count": len(enabled), "enabled": sorted(enabled)},
        "calibration": {"texts": len(used), "tokens": sum(map(len, used)), "max_length": max_length},
        "exports": export_all(model, info, out, weights=weights, policy=policy, scales=scales, progress=progress),
    }
    (out / "quantizers.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def load_model(info: CheckpointInfo) -> torch.nn.Module:
    """The checkpoint in float32, which scales are measured in, with the attention that ModelOpt can hook.

    Raises UserError when a tensor that the architecture needs is missing: transformers would fill in random values.
    """
    factory: Any = transformers.AutoModelForCausalLM
    model, loading = factory.from_pretrained(
        info.path,
        dtype=torch.float32,
        attn_implementation="sdpa",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    missing = sorted(loading["missing_keys"]) + sorted(str(key) for key in loading["mismatched_keys"])
    if missing:
        raise UserError(
            f"model.path={info.path}: the weights do not fit {info.architecture}, {missing[0]} is missing or has "
            "another shape; give the complete checkpoint"
        )
    return cast(torch.nn.Module, model.eval())


def dequantized_weights(model: torch.nn.Module, layers: int) -> dict[str, torch.Tensor]:
    """Tensor name -> effective float32 weight of every quantized linear layer."""
    names = [f"model.layers.{layer}.{linear}" for layer in range(layers) for linear in LINEARS]
    return {f"{name}.weight": adapter.effective_weight(model.get_submodule(name)) for name in names}


def _forward_loop(what: str, samples: list[list[int]], progress: Progress) -> adapter.ForwardLoop:
    passes = 0

    def forward_loop(model: torch.nn.Module) -> None:
        nonlocal passes
        passes += 1
        for done, ids in enumerate(samples):
            progress(f"calibrating the {what}, pass {passes}", done, len(samples))
            # One text at a time: padding would count in the maxima. The cache is not used, its quantizers still run.
            model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1)
        progress(f"calibrating the {what}, pass {passes}", len(samples), len(samples))

    return forward_loop


def measure(model: torch.nn.Module, info: CheckpointInfo, policy: KVPolicy, forward_loop: adapter.ForwardLoop) -> Measured:
    """What the policy's calibrated sides reach, one pass over the texts for each rotation."""
    return {
        rotation: adapter.measure(model, places, rotation, forward_loop, info.path)
        for rotation, places in measurements(policy, info.shape.layers).items()
    }


def _expressed_by(policy: KVPolicy, layer: int) -> dict[Side, str]:
    """A window's second copies have no quantizer: a tensor has one, and it stands for the base copy."""
    return {
        name: "sidecar only" if name.in_window else expressed_by(form, backend=adapter.BACKEND_AVAILABLE)
        for name, form in policy.sides(layer).items()
    }
