"""Policies, texts and checkpoints on which the quantize stage is tested with the real ModelOpt."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from pipeline.checkpoint import inspect_checkpoint
from pipeline.kv import FP16_POLICY, DType, Format, KVPolicy
from pipeline.weights import WeightsFormat
from stages.quantize import modelopt_adapter as adapter
from stages.quantize import quantize
from stages.quantize.recipe import make_recipe
from stages.quantize.run import load_model

FP8 = Format(dtype="fp8_e4m3", granularity="per_tensor", scale="calibrated")
FP8_UNCALIBRATED = Format(dtype="fp8_e4m3", granularity="per_tensor", scale="uncalibrated")
INT4_TENSOR = Format(dtype="int4", granularity="per_tensor", scale="calibrated")


def per_token(dtype: DType) -> Format:
    return Format(dtype=dtype, granularity="per_token", scale="dynamic")


def per_group(dtype: DType, size: int) -> Format:
    return Format(dtype=dtype, granularity="per_group", group_size=size, scale="dynamic")


POLICIES = {
    policy.name: policy
    for policy in (
        FP16_POLICY,
        KVPolicy(name="fp8", key=FP8, value=FP8),
        KVPolicy(name="fp8_uncalibrated", key=FP8_UNCALIBRATED, value=FP8_UNCALIBRATED),
        KVPolicy(name="int8", key=per_token("int8"), value=per_token("int8")),
        KVPolicy(name="fp8k_int4v", key=FP8, value=per_group("int4", 64)),
        KVPolicy(name="int4", key=per_token("int4"), value=per_token("int4")),
        KVPolicy(name="int4_tensor", key=INT4_TENSOR, value=INT4_TENSOR),
    )
}
TEXTS = [
    "The river rises in the hills and runs north to the sea.",
    "Record 17: name Ada, city Turin, code 4471. " * 4,
    '{"tool": "lookup", "arguments": {"name": "Ada"}}',
]
MAX_LENGTH = 96


def no_progress(label: str, done: int, total: int) -> None:
    """Nobody watches."""


def stage(checkpoint: Path, out: Path, policy: str | KVPolicy, weights: WeightsFormat = "none", **options: Any) -> None:
    arguments: dict[str, Any] = {
        "calibration_texts": TEXTS,
        "max_length": MAX_LENGTH,
        "seed": 0,
        "progress": no_progress,
    }
    chosen = policy if isinstance(policy, KVPolicy) else POLICIES[policy]
    quantize(checkpoint, out, weights=weights, policy=chosen, **(arguments | options))


def random_checkpoint(name: str, tokenizer_from: Path, directory: Path) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=json.loads((tokenizer_from / "config.json").read_text())["vocab_size"],
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **({"head_dim": 64} if name != "Qwen2" else {}),
        **({"sliding_window": None} if name == "Mistral" else {}),
    )
    getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(directory)
    for file in tokenizer_from.glob("*token*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def quantized_model(checkpoint: Path, policy: KVPolicy, weights: WeightsFormat = "none") -> torch.nn.Module:
    info = inspect_checkpoint(checkpoint)
    model = load_model(info)
    recipe = make_recipe(weights, policy, info.shape.layers, group_backend=adapter.GROUP_BACKEND_AVAILABLE)
    adapter.quantize_model(model, recipe, lambda m: [m(input_ids=ids, use_cache=False) for ids in token_ids(checkpoint)])
    return model


def token_ids(checkpoint: Path) -> list[torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    return [torch.tensor([tokenizer(text, truncation=True, max_length=MAX_LENGTH)["input_ids"]]) for text in TEXTS]
