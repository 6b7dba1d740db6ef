"""The steps of the quantize stage: quantize the weights, measure the cache's extremes, compute a policy's scales.

Only the last step depends on the policy, so a model is quantized and measured once for all compared caches. ModelOpt uses
215 MB of memory, so functions import it when needed.
"""

import copy
import json
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from stages.checkpoints.description import CheckpointInfo, inspect_checkpoint
from stages.checkpoints.exports import tensorrt_llm_refusal
from stages.checkpoints.families import LINEARS
from stages.checkpoints.loading import load_causal_lm, load_tokenizer
from stages.checkpoints.quantized import MODELOPT_FILE, SERVED
from stages.core.records import Progress
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVPolicy
from stages.policies.scales import write_policy
from stages.quantize.calibration import tokenize
from stages.quantize.materialize import (
    checkpoint_scales,
    copy_checkpoint,
    copy_without_scales,
    source_dtype,
    write_dequantized,
    write_plain,
)
from stages.quantize.recipe import QUANT_ALGO, ForwardLoop, weight_recipe
from stages.quantize.scales import EXTREMES_FILE, read_extremes, static_scales, write_extremes

CHECKPOINT = "checkpoint"
UNIFIED_HF, TENSORRT_LLM = "unified_hf", "tensorrt_llm"
"""Folders of ModelOpt's exports."""


def quantize_weights(
    checkpoint: Path,
    out: Path,
    *,
    weights: WeightsFormat,
    calibration_texts: list[str],
    max_length: int,
    seed: int,
    ranks: int = 1,
    progress: Progress,
) -> None:
    """Quantize a checkpoint's weights, which the baseline and all candidates share.

    `out` receives:

    - `checkpoint/`: a plain Hugging Face checkpoint with the engine's effective weights (see materialize.py).
    - `served/`: the checkpoint itself, which engines load, if its weights are already quantized.
    - `unified_hf/`, `tensorrt_llm/`: ModelOpt's exports of quantized weights, if they support the model. The second is split
      over `ranks` GPUs.
    """
    info = inspect_checkpoint(checkpoint)
    samples = tokenize(load_tokenizer(checkpoint), calibration_texts, max_length, info.vocab_size)
    if info.quantized is not None:
        copy_without_scales(info, out / SERVED)
        write_plain(info, out / CHECKPOINT, progress)
    elif weights != "none":
        model = quantized_model(info, weights, samples, seed, progress)
        write_dequantized(info, out / CHECKPOINT, dequantized_weights(model, info.shape.layers))
        export_weights(model, info, weights, out, weight_exports(info), ranks)
    else:
        copy_checkpoint(info, out / CHECKPOINT)


def measure_cache(
    checkpoint: Path, weights: Path, out: Path, *, calibration_texts: list[str], max_length: int, progress: Progress
) -> None:
    """Write `extremes.json`: the extremes of keys and values per channel, measured with the finished weights.

    `checkpoint` is the user's, for error messages. `weights` is the output of `quantize_weights`: the cache is measured in a
    later step, because AWQ would choose other weights if the cache's quantizers were enabled. `max_length`: maximum tokens per
    text.
    """
    info = inspect_checkpoint(weights / CHECKPOINT)
    samples = tokenize(load_tokenizer(info.path), calibration_texts, max_length, info.vocab_size)
    progress("loading the checkpoint", 0, 1)
    model = load_model(info).to(calibration_device())
    progress("loading the checkpoint", 1, 1)
    from stages.quantize import modelopt_adapter as adapter

    measured = adapter.measure_extremes(model, info.shape.layers, forward_loop("cache", samples, progress), checkpoint)
    write_extremes(out / EXTREMES_FILE, measured)


def scale_cache(checkpoint: Path, out: Path, *, policy: KVPolicy, extremes: Path | None) -> None:
    """Write `kv_policy.json` and `kv_scales.json` (static scales), because ModelOpt's exports cannot express every policy.

    `extremes`: output directory of `measure_cache`; None if no scale is calibrated, or the checkpoint has all scales.
    """
    info = inspect_checkpoint(checkpoint)
    policy.check_shape(info.shape)
    carried = None if info.quantized is None else checkpoint_scales(info, policy)
    measured = {} if extremes is None else read_extremes(extremes / EXTREMES_FILE)
    scales = carried or static_scales(policy, info.shape, measured, checkpoint)
    write_policy(out, policy, scales)


def quantized_model(
    info: CheckpointInfo, weights: WeightsFormat, samples: list[list[int]], seed: int, progress: Progress
) -> torch.nn.Module:
    """Load a checkpoint and quantize its weights, reproducibly; return it on the CPU."""
    from stages.quantize import modelopt_adapter as adapter

    torch.manual_seed(seed)
    progress("loading the checkpoint", 0, 1)
    model, layers = load_model(info).to(calibration_device()), info.shape.layers
    progress("loading the checkpoint", 1, 1)
    adapter.quantize_model(model, weight_recipe(weights, layers), forward_loop("weights", samples, progress))
    # The exports fuse and cast before they round. `checkpoint/` uses the same order, so that evaluated weights are shipped.
    adapter.fuse_shared_inputs(model, layers)
    adapter.cast_for_export(model, source_dtype(info))
    return model.cpu()


def weight_exports(info: CheckpointInfo) -> list[str]:
    """Return the names of ModelOpt's exports that support the model."""
    return [UNIFIED_HF] if tensorrt_llm_refusal(info) else [TENSORRT_LLM, UNIFIED_HF]


def export_weights(
    model: torch.nn.Module, info: CheckpointInfo, weights: WeightsFormat, out: Path, exports: Collection[str], ranks: int
) -> None:
    """Write `exports` of a model that has ModelOpt's quantizers, each to its folder in `out`, without a cache's format.

    Changes the model. Raises RuntimeError if ModelOpt declares another format of the weights than `weights`.
    """
    from stages.quantize import modelopt_adapter as adapter

    if TENSORRT_LLM in exports:
        adapter.export_tensorrt_llm(copy.deepcopy(model), out / TENSORRT_LLM, source_dtype(info), ranks)
    if UNIFIED_HF in exports:
        adapter.export_unified_hf(model, out / UNIFIED_HF)
    for name in exports:
        file = out / name / (MODELOPT_FILE if name == UNIFIED_HF else "config.json")
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}  # absent if nothing is quantized
        declared = (content.get("quantization") or {}).get("quant_algo")
        if declared != QUANT_ALGO[weights]:
            raise RuntimeError(f"{file}: quant_algo is {declared!r}, must be {QUANT_ALGO[weights]!r} for weights={weights}")


def calibration_device() -> torch.device:
    """Return the device on which ModelOpt quantizes and measures: a GPU if torch finds one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(info: CheckpointInfo) -> torch.nn.Module:
    """Load the checkpoint in float32, the type for measuring scales, with an attention that ModelOpt can hook."""
    # torch's own attention (sdpa) supports neither softcap nor sinks.
    attention = "eager" if info.features else "sdpa"
    model: torch.nn.Module = load_causal_lm(info.path, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


def dequantized_weights(model: torch.nn.Module, layers: int) -> dict[str, torch.Tensor]:
    """Return tensor name -> effective float32 weight (out, in) of every quantized linear layer."""
    from stages.quantize import modelopt_adapter as adapter

    names = [f"model.layers.{layer}.{linear}" for layer in range(layers) for linear in LINEARS]
    return {f"{name}.weight": adapter.effective_weight(model.get_submodule(name)) for name in names}


def forward_loop(subject: str, samples: Sequence[Sequence[int]], progress: Progress) -> ForwardLoop:
    """Return the function that ModelOpt calls to run all texts. `subject` (weights or cache) labels the progress."""
    passes = 0

    def run_texts(model: torch.nn.Module) -> None:
        nonlocal passes
        passes += 1
        for done, ids in enumerate(samples):
            progress(f"calibrating the {subject}, pass {passes}", done, len(samples))
            # One text at a time, because padding would affect the maxima. The cache's quantizers run even without a cache.
            input_ids = torch.tensor([list(ids)], device=next(model.parameters()).device)
            model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
        progress(f"calibrating the {subject}, pass {passes}", len(samples), len(samples))

    return run_texts
