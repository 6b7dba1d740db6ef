"""The tiny checkpoint as benchmarks of engines use it: its model, tokens, policies, scales and ONNX bundles.

The pipeline measures extremes with ModelOpt's quantizers. Benchmarks need the scales of dozens of policies, and of formats that
ModelOpt does not calibrate: they come from a model's own keys and values, by the pipeline's rule (`stages/quantize/scales.py`).
Legend: H KV heads, T tokens, D head_dim.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.recording import ROOT
from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy, Side
from pipeline.core.records import no_progress
from pipeline.core.scales import KVScales, SideScales
from stages.checkpoints import load_causal_lm, load_tokenizer
from stages.engines.onnx.build import build_bundle
from stages.engines.onnx.export import export_decoder
from stages.engines.oracle.formats import rotated
from stages.quantize.scales import Extremes, calibrated
from stages.workloads.prompts import token_ids
from stages.workloads.trained import story

CHECKPOINT = ROOT / "stages" / "tiny" / "checkpoint"


def load_policy(name: str) -> KVPolicy:
    """Return the policy of conf/kv/NAME.yaml."""
    return KVPolicy.model_validate(yaml.safe_load((ROOT / "conf" / "kv" / f"{name}.yaml").read_text()))


def load_model(checkpoint: Path = CHECKPOINT) -> Any:
    """Return the checkpoint's model in float32, the type that the CPU engines compute in."""
    return load_causal_lm(checkpoint, dtype=torch.float32).eval()


def story_tokens(rows: int, length: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return token ids (rows, length) of generated prose, a different text in each row."""
    tokenizer, out = load_tokenizer(CHECKPOINT), np.empty((rows, length), np.int64)
    for row in range(rows):
        rng, ids = random.Random(f"{seed} {row}"), list[int]()
        while len(ids) < length:
            ids += token_ids(tokenizer, "\n\n".join(story(rng) for _ in range(20)), length)
        out[row] = ids[:length]
    return out


def make_bundle(policy: KVPolicy, scales: KVScales, work: Path, checkpoint: Path = CHECKPOINT) -> Path:
    """Build the ONNX engine bundle of a checkpoint under `policy` in the directory `work`, and return its path."""
    decoder, bundle = work / "decoder", work / policy.name
    if not decoder.exists():
        decoder.mkdir(parents=True)
        export_decoder(checkpoint, decoder, compute_dtype="float32", progress=no_progress)
    bundle.mkdir()
    path = work / f"{policy.name}.scales.json"
    path.write_text(scales.model_dump_json())
    build_bundle(decoder, bundle, policy=policy, scales=path, progress=no_progress)
    return bundle


CachedStates = tuple[dict[str, Tensor], ...]
"""Keys (after RoPE) and values of every layer over some texts, each (H, T, D) float32."""


@torch.no_grad()
def cached_states(model: LlamaForCausalLM, texts: Sequence[Sequence[int]]) -> CachedStates:
    """Return the keys and values that the unquantized model caches for texts of token ids."""
    layers: list[dict[str, list[Tensor]]] = [{"key": [], "value": []} for _ in range(model.config.num_hidden_layers)]
    for text in texts:
        cache = DynamicCache()
        model.model(torch.tensor([list(text)]), past_key_values=cache, use_cache=True)
        for states, layer in zip(layers, cache.layers, strict=True):
            assert layer.keys is not None
            assert layer.values is not None
            states["key"].append(layer.keys[0].float())
            states["value"].append(layer.values[0].float())
    return tuple({side: torch.cat(parts, dim=1) for side, parts in states.items()} for states in layers)


def calibrated_scales(x_HTD: Tensor, form: Format) -> SideScales:
    """Return the static scales, and the zeros of an asymmetric format, with which no number of x_HTD saturates.

    An uncalibrated format has a scale of 1.
    """
    heads, _, dim = x_HTD.shape
    count = form.static_scales(heads, dim)
    if form.scale == "uncalibrated":
        return SideScales(scale=(1.0,) * count)
    x_HTD = rotated(x_HTD, form)
    low, high, amax = (tuple(x.flatten().tolist()) for x in (x_HTD.amin(1), x_HTD.amax(1), x_HTD.abs().amax(1)))
    return calibrated(form, count, Extremes(low, high, amax))


def kv_scales(policy: KVPolicy, states: CachedStates) -> KVScales:
    """Return the scales of every static side of `policy`."""
    layers: list[dict[Side, SideScales]] = []
    for number, tensors in enumerate(states):
        sides = policy.sides(number).items()
        layers.append({side: calibrated_scales(tensors[side.base], form) for side, form in sides if form.has_static_scales})
    return KVScales(layers=tuple(layers))
