"""The quantize stage, step by step."""

import json
from pathlib import Path
from typing import cast

import torch
import transformers

from pipeline.checkpoint.description import CheckpointInfo, inspect_checkpoint
from pipeline.checkpoint.families import LINEARS
from pipeline.checkpoint.quantized import SERVED
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.formats import WeightsFormat
from pipeline.core.kv import POLICY_FILE, KVPolicy
from pipeline.core.records import Progress
from pipeline.core.scales import SCALES_FILE
from stages.checkpoints import load_causal_lm, load_tokenizer
from stages.quantize import modelopt_adapter as adapter
from stages.quantize.calibration import tokenize
from stages.quantize.dequantize import copy_without_scales, own_scales, write_plain
from stages.quantize.materialize import copy_checkpoint, source_dtype, write_dequantized
from stages.quantize.recipe import measurements, weight_recipe
from stages.quantize.scales import Measured, static_scales

CPU = torch.device("cpu")


def quantize(
    checkpoint: Path,
    out: Path,
    *,
    weights: WeightsFormat,
    policy: KVPolicy,
    calibration_texts: list[str],
    max_length: int,
    seed: int,
    progress: Progress,
    device: str = "cpu",
) -> None:
    """Quantize a checkpoint's weights and measure the static scales of its KV cache.

    `out` receives:

    - `checkpoint/`: a plain Hugging Face checkpoint with the weights as the engine sees them (see materialize.py).
    - `served/`: of a checkpoint whose weights are quantized already, the checkpoint itself, which engines load.
    - `kv_policy.json`, `kv_scales.json`: the sidecar that carries what no official export can.
    - `quantizers.json`: which quantizers of weights were enabled, the calibration's size, and the device.
    """
    info = inspect_checkpoint(checkpoint)
    policy.check_shape(info.shape)
    layers, runs_on = info.shape.layers, resolve_device(device)
    samples = tokenize(load_tokenizer(checkpoint), calibration_texts, max_length, info.vocab_size)
    own = None
    if info.quantized is not None:
        own = own_scales(info.path, policy, info.shape)
        copy_without_scales(info, out / SERVED)
        write_plain(info, out / "checkpoint", progress)
        info = inspect_checkpoint(out / "checkpoint")
    # Weights come first, and the cache is measured on the finished weights: AWQ's search would otherwise choose other
    # weights for every KV policy, and a candidate would differ from its baseline in more than the cache.
    if weights != "none":
        model = quantized_model(info, weights, samples, seed, progress, runs_on)
        write_dequantized(info, out / "checkpoint", dequantized_weights(model, layers))
    elif info.path != out / "checkpoint":
        copy_checkpoint(info, out / "checkpoint")
    measured: Measured = {}
    if own is None and measurements(policy, layers):
        progress("loading the checkpoint", 0, 1)
        model = load_model(inspect_checkpoint(out / "checkpoint")).to(runs_on)
        progress("loading the checkpoint", 1, 1)
        measured = measure(model, info, policy, _forward_loop("cache", samples, progress))
    scales = own or static_scales(policy, info.shape, measured, info.path)
    used = samples if weights != "none" or measured else []

    (out / POLICY_FILE).write_text(policy.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (out / SCALES_FILE).write_text(scales.model_dump_json(indent=1) + "\n", encoding="utf-8")
    report = {
        "modelopt": adapter.VERSION,
        "transformers": transformers.__version__,
        "device": runs_on.type,
        "weights": weights,
        "kv_policy": policy.name,
        "quantizers": sorted(weight_recipe(weights, layers).expected),
        "calibration": {"texts": len(used), "tokens": sum(map(len, used)), "max_length": max_length},
    }
    (out / "quantizers.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def quantized_model(
    info: CheckpointInfo,
    weights: WeightsFormat,
    samples: list[list[int]],
    seed: int,
    progress: Progress,
    device: torch.device = CPU,
) -> torch.nn.Module:
    """Load a checkpoint and quantize its weights on a device, without the cache's quantizers: the same model at every call.

    The model that is returned lies on the CPU.
    """
    torch.manual_seed(seed)
    progress("loading the checkpoint", 0, 1)
    model = load_model(info).to(device)
    progress("loading the checkpoint", 1, 1)
    if weights != "none":
        layers = info.shape.layers
        adapter.quantize_model(model, weight_recipe(weights, layers), _forward_loop("weights", samples, progress))
        # The exports fuse, cast and only then round. `checkpoint/` follows their order, so that what is judged is shipped.
        adapter.fuse_shared_inputs(model, layers)
        adapter.cast_for_export(model, source_dtype(info))
    return model.cpu()


def resolve_device(device: str) -> torch.device:
    """Return the device that `quantize.device` means here."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise MissingRequirement("quantize.device=cuda: torch finds no NVIDIA GPU here; set quantize.device=auto")
    return torch.device("cuda") if available and device != "cpu" else CPU


def load_model(info: CheckpointInfo) -> torch.nn.Module:
    """Load the checkpoint in float32, in which scales are measured, with the attention that ModelOpt can hook."""
    # torch's own attention knows neither softcap nor sinks.
    attention = "eager" if info.features else "sdpa"
    model, loading = load_causal_lm(info.path, dtype=torch.float32, attn_implementation=attention, output_loading_info=True)
    missing = sorted(loading["missing_keys"]) + sorted(str(key) for key in loading["mismatched_keys"])
    if missing:
        raise UserError(
            f"model.path={info.path}: the weights do not fit {info.architecture}, {missing[0]} is missing or has "
            "another shape; give the complete checkpoint"
        )
    return cast(torch.nn.Module, model.eval())


def dequantized_weights(model: torch.nn.Module, layers: int) -> dict[str, torch.Tensor]:
    """Return tensor name -> effective float32 weight (out, in) of every quantized linear layer."""
    names = [f"model.layers.{layer}.{linear}" for layer in range(layers) for linear in LINEARS]
    return {f"{name}.weight": adapter.effective_weight(model.get_submodule(name)) for name in names}


def _forward_loop(subject: str, samples: list[list[int]], progress: Progress) -> adapter.ForwardLoop:
    """Return what ModelOpt calls to run all texts; `subject` (weights or cache) and the pass label the progress."""
    passes = 0

    def forward_loop(model: torch.nn.Module) -> None:
        nonlocal passes
        passes += 1
        for done, ids in enumerate(samples):
            progress(f"calibrating the {subject}, pass {passes}", done, len(samples))
            # One text at a time, because padding would count in the maxima. No cache is kept; its quantizers still run.
            input_ids = torch.tensor([ids], device=next(model.parameters()).device)
            model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
        progress(f"calibrating the {subject}, pass {passes}", len(samples), len(samples))

    return forward_loop


def measure(model: torch.nn.Module, info: CheckpointInfo, policy: KVPolicy, forward_loop: adapter.ForwardLoop) -> Measured:
    """Measure the extremes of the policy's calibrated sides, in one pass over the texts for each rotation."""
    return {
        rotation: adapter.measure(model, places, rotation, forward_loop, info.path)
        for rotation, places in measurements(policy, info.shape.layers).items()
    }
