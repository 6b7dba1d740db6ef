"""Policies, texts and checkpoints for tests of the quantize stage with the real ModelOpt."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from helpers.checkpoints.families import family_model
from helpers.policies.shipped import SHIPPED
from stages.checkpoints.description import inspect_checkpoint
from stages.core.records import no_progress
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVPolicy, Side
from stages.policies.scales import SCALES_FILE
from stages.quantize.materialize import source_dtype
from stages.quantize.recipe import weight_recipe
from stages.quantize.run import load_model, measure_cache, quantize_weights, scale_cache

POLICIES = {name: policy for name, policy in SHIPPED.items() if name != "int4_g128"}
"""Every shipped policy that fits the tiny model's head_dim of 64."""
TEXTS = [
    "The river rises in the hills and runs north to the sea.",
    "Record 17: name Ada, city Turin, code 4471. " * 4,
    '{"tool": "lookup", "arguments": {"name": "Ada"}}',
]
MAX_LENGTH = 96


def stage(checkpoint: Path, out: Path, policy: str | KVPolicy, weights: WeightsFormat = "none", **options: Any) -> None:
    """Quantize with TEXTS, scale the cache, and export to `out/exports`; `options` replace other arguments."""
    from stages.quantize.export import export

    run: dict[str, Any] = {"calibration_texts": TEXTS, "max_length": MAX_LENGTH, "progress": no_progress} | options
    policy = policy if isinstance(policy, KVPolicy) else POLICIES[policy]
    quantize_weights(checkpoint, out, weights=weights, seed=0, **run)
    extremes = None
    if any(form.scale == "calibrated" for _, form in policy.formats):
        extremes = out / "extremes"
        extremes.mkdir()
        measure_cache(checkpoint, out, extremes, **run)
    scale_cache(checkpoint, out, policy=policy, extremes=extremes)
    (out / "exports").mkdir()
    export(checkpoint, out, out / SCALES_FILE, out / "exports", weights=weights, policy=policy, progress=run["progress"])


def random_checkpoint(family: str, tokenizer_from: Path, directory: Path, rope_scaling: dict[str, Any] | None = None) -> Path:
    """Save a two-layer model of a family with random bfloat16 weights and the tokenizer of `tokenizer_from`."""
    plain = {"num_hidden_layers": 2, "rope_scaling": rope_scaling, "sliding_window": None, "use_sliding_window": False}
    vocabulary = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    family_model(family, vocab_size=vocabulary, **plain).to(torch.bfloat16).save_pretrained(directory)
    for file in tokenizer_from.glob("*token*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def quantized_model(checkpoint: Path, weights: WeightsFormat) -> torch.nn.Module:
    """Return a model whose weights and inputs are rounded by ModelOpt's quantizers."""
    from stages.quantize import modelopt_adapter as adapter

    info = inspect_checkpoint(checkpoint)
    model = load_model(info)

    def forward_loop(model: torch.nn.Module) -> None:
        for ids in token_ids(checkpoint):
            model(input_ids=ids, use_cache=False)

    adapter.quantize_model(model, weight_recipe(weights, info.shape.layers), forward_loop)
    adapter.fuse_shared_inputs(model, info.shape.layers)
    adapter.cast_for_export(model, source_dtype(info))
    return model.float()


def cache_states(model: Any, checkpoint: Path) -> list[dict[Side, torch.Tensor]]:
    """Return the keys (after the rotary embedding) and values of TEXTS by layer and side.

    Each tensor has the shape (heads, tokens of all texts, channels).
    """
    with torch.no_grad():
        caches = [model(input_ids=ids, use_cache=True).past_key_values for ids in token_ids(checkpoint)]
    return [
        {
            side: torch.cat([getattr(cache.layers[layer], f"{side}s")[0] for cache in caches], dim=1)
            for side in (Side.KEY, Side.VALUE)
        }
        for layer in range(len(caches[0].layers))
    ]


def token_ids(checkpoint: Path) -> list[torch.Tensor]:
    """Return the token ids of every text in TEXTS, shape (1, tokens) each."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    return [torch.tensor([tokenizer(text, truncation=True, max_length=MAX_LENGTH)["input_ids"]]) for text in TEXTS]
