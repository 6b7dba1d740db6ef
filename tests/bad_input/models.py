"""Checkpoints whose files are invalid or inconsistent."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from bad_input.forks import BadInput
from bad_input.makers import (
    CONFIG,
    LFS,
    TENSORS,
    Prepare,
    with_config,
    with_file,
    with_json,
    with_replaced,
    with_shards,
    with_weights,
)

MODEL = ("stage=build", "model.path=model", "workloads=builtin")
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}


def case(name: str, prepare: Prepare, *expected: str, **more: Any) -> BadInput:
    return BadInput(f"model: {name}", MODEL, ("model.path=", *(part.strip("'") for part in expected)), prepare, **more)


CONFIGS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("10^9 layers", {"num_hidden_layers": 10**9}, ("num_hidden_layers", "1000000000")),
    ("odd head_dim", {"head_dim": 7}, ("head_dim=7",)),
    ("unknown activation", {"hidden_act": "snake"}, ("hidden_act", "'snake'", "silu")),
    ("padding outside the vocabulary", {"pad_token_id": 10**9}, ("pad_token_id", "1000000000", "1,344")),
    ("rope_scaling of another kind", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("rope_scaling", "dynamic")),
    ("dtype and torch_dtype", {"dtype": "float16", "torch_dtype": "bfloat16"}, ("torch_dtype=bfloat16", "dtype=float16")),
    ("a dtype of auto", {"torch_dtype": "auto"}, ("torch_dtype must be one of float32", "'auto'")),
    ("another length under another name", {"n_positions": 1024}, ("n_positions=1024 is below max_position_embeddings=32768",)),
    ("a vision tower", {"vision_config": {}}, ("vision_config", "save only its language model")),
    ("MLA", {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, ("kv_lora_rank=512", "MLA")),
    ("architecture with terminal escape codes", {"architectures": ["\x1b[2J\nLlama"]}, ("not supported", "LlamaForCausalLM")),
    ("quantized for another backend", {"quantization_config": FP8}, ("modelopt", "backend=onnxruntime takes plain", "vllm")),
    ("a vocabulary larger than the weights'", {"vocab_size": 1345}, ("embed_tokens", "1345")),
    ("quantized, under an older key", {"compression_config": FP8}, ("modelopt", "backend=onnxruntime takes plain")),
    ("two activations", {"hidden_act": "silu", "hidden_activation": "gelu"}, ("hidden_act=silu", "hidden_activation=gelu")),
    ("more experts per token than experts", {"num_experts": 4, "num_experts_per_tok": 9}, ("num_experts_per_tok=9", "4")),
    ("rotary flags of other layers", {"no_rope_layers": [1]}, ("no_rope_layers must be null, or a list with 0 or 1 for each",)),
    ("a decoder in text_config", {"text_config": {"model_type": "llama"}}, ("text_config", "save only its language model")),
    ("a misspelt key", {"tie_word_embeddings": ..., "tie_word_embedings": True}, ("tie_word_embedings", "rename")),
)

ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, ORIGINAL: 64}
YARN = {"rope_type": "yarn", "factor": 4.0}
ROTARY_VALUES: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("a factor that is text", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ("factor must be a number", "got '2'")),
    ("a theta below 1", {"rope_theta": 1e-300}, ("rope_theta", "1e-300")),
    ("more than the whole head rotated", {"partial_rotary_factor": 2}, ("partial_rotary_factor", "2")),
    ("frequencies without a range", {"rope_scaling": LLAMA3}, ("rope_scaling.low_freq_factor", "1.0")),
    ("true as YaRN's beta", {"rope_scaling": YARN | {"beta_fast": True}}, ("rope_scaling.beta_fast", "number", "True")),
    ("half a position", {"rope_scaling": YARN | {ORIGINAL: 64.5}}, (f"rope_scaling.{ORIGINAL}", "whole number", "64.5")),
    ("YaRN's betas without a range", {"rope_scaling": YARN | {"beta_fast": 0.5}}, ("below beta_fast, got 1 and 0.5",)),
    ("a factor without a kind", {"rope_scaling": {"factor": 2.0}}, ("rope_scaling.factor=2.0", "rope_type=default")),
)


NORM, UP, EMBED = "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
FILE, CONFIG_JSON = "model.safetensors", "config.json"
FILES: tuple[tuple[str, Prepare, tuple[str, ...]], ...] = (
    ("truncated weights", with_file(FILE, lambda old: old[:-100]), (FILE, "download")),
    ("a tensor missing", with_weights({name: tensor for name, tensor in TENSORS.items() if name != NORM}), (NORM, "missing")),
    ("a tensor too many", with_weights(TENSORS | {"model.norm.bias": torch.zeros(128)}), ("norm.bias", "not part of")),
    ("FP8 weights", with_weights(TENSORS | {UP: TENSORS[UP].to(torch.float8_e4m3fn)}), (UP, "F8_E4M3")),
    ("offsets beyond the end",
     with_weights(TENSORS, header=lambda old: old | {NORM: old[NORM] | {"data_offsets": [0, 10**12]}}), (FILE,)),
    ("weights are a pipe", with_replaced(FILE, os.mkfifo), (FILE,)),
    ("an unknown format in ModelOpt's file", with_file("hf_quant_config.json", '{"quantization": {"quant_algo": "NVFP4"}}'),
     ("hf_quant_config.json: quantization.quant_algo='NVFP4'",)),
    ("an adapter next to the weights", with_file("adapter_config.json", "{}"), ("adapter_config.json", "merge")),
    ("no weights", with_replaced(FILE, lambda _: None), (FILE, "missing")),
    ("only pickled weights", with_replaced(FILE, lambda path: path.with_name("pytorch_model.bin").write_bytes(b"x")),
     ("pickled weights",)),
    ("no config.json", with_replaced(CONFIG_JSON, lambda _: None), (CONFIG_JSON, "missing")),
    ("config.json in a directory below", lambda directory: with_config()(directory / "model"),
     (CONFIG_JSON, "missing; give", "model/model")),
    ("NaN in config.json", with_file(CONFIG_JSON, json.dumps(CONFIG | {"initializer_range": float("nan")})),
     (CONFIG_JSON, "is not JSON", "NaN")),
    ("config.json is a pipe", with_replaced(CONFIG_JSON, os.mkfifo), (CONFIG_JSON, "pipe")),
)  # fmt: skip


INDEX = "model.safetensors.index.json"
NAMES = list(TENSORS)
IN_ONE = dict.fromkeys(NAMES, "a.safetensors")
SHARDS: tuple[tuple[str, Prepare, tuple[str, ...]], ...] = (
    ("an index without weight_map", with_shards({}), (INDEX, "weight_map")),
    ("an index with a number as a file", with_shards({"weight_map": {NORM: 5}}), (INDEX, "names 5")),
    ("an index that leaves the directory", with_shards({"weight_map": {NORM: "../x.safetensors"}}), (INDEX, "../x")),
    ("a shard missing", with_shards({"weight_map": {NORM: "c.safetensors"}}), (INDEX, "c.safetensors", "missing")),
    ("an index that swaps shards", with_shards({"weight_map": IN_ONE | {EMBED: "b.safetensors"}}), (INDEX, EMBED)),
    ("a tensor in two shards", with_shards({"weight_map": IN_ONE | {NORM: "b.safetensors"}},
     {"a.safetensors": NAMES, "b.safetensors": [NORM]}), (NORM, "both")),
)  # fmt: skip

TOKENIZER = "tokenizer.json"
EVIL = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}
TOKENIZERS: tuple[tuple[str, Prepare, tuple[str, ...]], ...] = (
    ("a token beyond the model", with_json(TOKENIZER, lambda old: old | {"model": old["model"] | {"vocab": {
        **old["model"]["vocab"], "zzz": 10**6}}}), (TOKENIZER, "1000000", "1344")),
    ("merges with dropout", with_json(TOKENIZER, lambda old: old | {"model": old["model"] | {"dropout": 0.5}}),
     (TOKENIZER, "dropout", "0.5")),
    ("a tokenizer class in the checkpoint", with_json("tokenizer_config.json", lambda old: old | EVIL),
     ("tokenizer_config.json", "auto_map")),
    ("generation_config with an end beyond the vocabulary",
     with_file("generation_config.json", json.dumps({"eos_token_id": [1, 1344]})),
     ("generation_config.json", "eos_token_id", "1,344 tokens")),
)  # fmt: skip

POINTED = ("config.json", TOKENIZER, "vocab.json", "merges.txt", "chat_template.jinja", FILE)
POINTERS = tuple((f"a Git LFS pointer as {name}", with_file(name, LFS), (name, "git lfs pull")) for name in POINTED)

CHECKED_AGAINST_MODEL = ("a vocabulary larger than the weights'", "a misspelt key", "a tensor missing", "a tensor too many")
"""Cases that are detected only after transformers has built the model on the meta device."""


def tokenizer_with(**parts: Any) -> Prepare:
    return with_json(TOKENIZER, lambda old: old | parts)


def tokenizer_config_with(**parts: Any) -> Prepare:
    return with_json("tokenizer_config.json", lambda old: old | parts)


def with_image_token(directory: Path) -> None:
    """Create `model` whose chat template writes a token that only models with more rows have."""
    tokenizer_config_with(chat_template="<image>{{ messages[0].content }}")(directory)
    path = directory / "model" / TOKENIZER
    old = json.loads(path.read_text())
    image = {**old["added_tokens"][0], "id": 1344, "content": "<image>"}
    path.write_text(json.dumps(old | {"added_tokens": [*old["added_tokens"], image]}))


CHECKED_AFTER_LOADING: tuple[tuple[str, Prepare, tuple[str, ...]], ...] = (
    ("chat_template that is no template", tokenizer_config_with(chat_template="{% for"), ("chat_template",)),
    ("an unknown normalizer", tokenizer_with(normalizer={"type": "Evil"}),
     ("its tokenizer cannot be loaded", "Normalizer", "correct tokenizer.json")),
    ("a template that leaves the question out", tokenizer_config_with(chat_template="Hello"), ("chat_template drops",)),
    ("a token that takes adjacent spaces", tokenizer_config_with(added_tokens_decoder={
        "3": {"content": "<|user|>", "lstrip": True, "rstrip": True, "special": True}}),
     ("differently", "added_tokens_decoder")),
    ("a chat_template with a token beyond the model", with_image_token, ("makes token 1344",)),
    ("no decoder", tokenizer_with(decoder=None), ("decodes the tokens of '9 of 10' as",)),
    ("no eos_token", tokenizer_config_with(eos_token=None), ("no eos_token",)),
    ("a post-processor with a missing token", tokenizer_with(post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<nope>", "type_id": 0}}], "pair": [],
        "special_tokens": {}}), ("its tokenizer cannot be loaded",)),
    ("a tokenizer that deletes everything",
     tokenizer_with(normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": ""}), ("encodes different texts",)),
)  # fmt: skip
"""Cases that are detected only after transformers has opened the tokenizer."""

VLLM = ("stage=build", "model.path=model", "backend=vllm", "backend.max_model_len=2048", "kv=fp8_e5m2")

CASES = [
    BadInput(
        "model: plain weights that are declared as quantized",
        VLLM,
        ("quantization_config", "declares weights in the form of", "remove it if they are plain"),
        with_config(quantization_config=FP8),
    ),
    *(
        case(name, prepare, *expected, loads_model=name in CHECKED_AGAINST_MODEL)
        for name, prepare, expected in (
            *((name, with_config(**changes), expected) for name, changes, expected in (*CONFIGS, *ROTARY_VALUES)),
            *(*FILES, *SHARDS, *TOKENIZERS, *POINTERS),
        )
    ),
    *(case(name, prepare, *expected, loads_model=True) for name, prepare, expected in CHECKED_AFTER_LOADING),
]
