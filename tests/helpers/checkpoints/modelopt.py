"""Policies, texts and checkpoints for tests of the quantize stage with the real ModelOpt."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from helpers.checkpoints.families import family_model
from helpers.policies.shipped import SHIPPED
from stages.core.records import no_progress
from stages.policies.formats import WeightsFormat
from stages.policies.scales import SCALES_FILE
from stages.quantize.run import measure_cache, quantize_weights, scale_cache

TEXTS = [
    "The river rises in the hills and runs north to the sea.",
    "Record 17: name Ada, city Turin, code 4471. " * 4,
    '{"tool": "lookup", "arguments": {"name": "Ada"}}',
]
MAX_LENGTH = 96


def stage(checkpoint: Path, out: Path, kv: str, weights: WeightsFormat = "none") -> None:
    """Quantize with TEXTS, scale the cache, and export to `out/exports`."""
    from stages.quantize.export import export

    run: dict[str, Any] = {"calibration_texts": TEXTS, "max_length": MAX_LENGTH, "progress": no_progress}
    policy = SHIPPED[kv]
    quantize_weights(checkpoint, out, weights=weights, seed=0, **run)
    extremes = None
    if any(form.scale == "calibrated" for _, form in policy.formats):
        extremes = out / "extremes"
        extremes.mkdir()
        measure_cache(checkpoint, out, extremes, **run)
    scale_cache(checkpoint, out, policy=policy, extremes=extremes)
    (out / "exports").mkdir()
    export(checkpoint, out, out / SCALES_FILE, out / "exports", weights=weights, policy=policy, progress=no_progress)


def random_checkpoint(family: str, tokenizer_from: Path, directory: Path) -> Path:
    """Save a two-layer model of a family with random bfloat16 weights and the tokenizer of `tokenizer_from`."""
    plain = {"num_hidden_layers": 2, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False}
    vocabulary = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    family_model(family, vocab_size=vocabulary, **plain).to(torch.bfloat16).save_pretrained(directory)
    for file in tokenizer_from.glob("*token*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def token_ids(checkpoint: Path) -> list[torch.Tensor]:
    """Return the token ids of every text in TEXTS, shape (1, tokens) each."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    return [torch.tensor([tokenizer(text, truncation=True, max_length=MAX_LENGTH)["input_ids"]]) for text in TEXTS]
