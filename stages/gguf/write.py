"""Writes a Hugging Face checkpoint as a GGUF, with the package gguf: what `convert_gguf` reads, the other way.

Matrices are float16, those of a float32 checkpoint float32; vectors are float32. A tokenizer is written where llama.cpp has one
that cuts text alike; without one the file takes token ids alone.
"""

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from safetensors import safe_open

from pipeline.checkpoint.description import CheckpointInfo, read_config
from pipeline.checkpoint.files import refusal
from pipeline.checkpoint.rope import rope_at_top_level
from pipeline.checkpoint.weights import tensors_on_disk
from pipeline.core.records import Progress
from pipeline.gguf.model import ROPE_FACTORS, SIZES, architecture_of, llama3_factors, pairs_neighbours, tensors_of
from pipeline.gguf.vocabulary import CONTROL, GPT2, NORMAL, SPLITTERS, UNUSED, USER_DEFINED

Tokenizer = dict[str, Any]


def write_gguf(info: CheckpointInfo, out: Path, progress: Progress) -> None:
    """Write the new file `out`. Raises UserError for a model that is not written, or a weight that float16 does not hold."""
    config = rope_at_top_level(read_config(info.path))
    architecture = architecture_of(info.path, config)
    full = {**config, "num_key_value_heads": info.shape.kv_heads, "head_dim": info.shape.head_dim}
    full["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    writer: Any = GGUFWriter(out, architecture)
    _sizes(writer, architecture, full)
    _tokenizer(writer, info.path, full)
    names = tensors_of(architecture, full)
    weights = tensors_on_disk(info)
    for done, (name, (target, _)) in enumerate(names.items()):
        progress("writing", done, len(names))
        with safe_open(info.path / weights[target][0], "pt") as stored:
            kept = stored.get_tensor(target)
        values = kept.float()
        heads = {"attn_q": full["num_attention_heads"], "attn_k": info.shape.kv_heads}.get(name.split(".")[-2])
        if heads and pairs_neighbours(config["model_type"]):
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape)
        if values.dim() > 1 and kept.dtype != torch.float32:
            values = values.half()
            if not torch.isfinite(values).all():
                raise refusal(info.path, f"tensor {target} holds a value that float16 does not; give a GGUF of the model")
        writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    progress("writing", len(names), len(names))


def _sizes(writer: Any, architecture: str, config: dict[str, Any]) -> None:
    head_dim, base = config["head_dim"], float(config.get("rope_theta") or 10000.0)
    sizes = {key: config[name] for key, name in SIZES.items()}
    sizes |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), head_dim)
    for key, size in {**sizes, "vocab_size": config["vocab_size"]}.items():
        writer.add_uint32(f"{architecture}.{key}", size)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.get("rms_norm_eps", 1e-6))
    writer.add_float32(f"{architecture}.rope.freq_base", base)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3":
        writer.add_tensor(ROPE_FACTORS, torch.tensor(llama3_factors(head_dim // 2, base, scaling)).numpy())
    elif kind != "default":
        writer.add_string(f"{architecture}.rope.scaling.type", kind)
        writer.add_float32(f"{architecture}.rope.scaling.factor", scaling["factor"])
        original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
        writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", original)


def _tokenizer(writer: Any, path: Path, config: dict[str, Any]) -> None:
    tokenizer: Tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    pre = next((name for name, splitter in SPLITTERS.items() if splitter.patterns == _patterns(tokenizer)), None)
    if pre is None or tokenizer["model"]["type"] != "BPE":
        writer.add_tokenizer_model("none")
        return
    tokens = {i: (text, NORMAL) for text, i in tokenizer["model"]["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    listed = [tokens.get(i, (f"[UNUSED{i}]", UNUSED)) for i in range(config["vocab_size"])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([text for text, _ in listed])
    writer.add_token_types([kind for _, kind in listed])
    writer.add_token_merges(merges)
    around = (tokenizer.get("post_processor") or {}).get("single", [])
    writer.add_add_bos_token(bool(around) and "SpecialToken" in around[0])
    beside = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name, write in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id), ("pad", writer.add_pad_token_id)):
        given = config.get(f"{name}_token_id")
        if given is not None:
            write(given[0] if isinstance(given, list) else given)
    template = path / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else beside.get("chat_template")
    if isinstance(text, str):
        writer.add_chat_template(text)


def _patterns(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the expressions that cut its text, one after the other."""
    cuts = tokenizer.get("pre_tokenizer") or {}
    found = []
    for cut in cuts.get("pretokenizers", [cuts]):
        if cut.get("type") == "Split":
            found.append(cut["pattern"].get("Regex", ""))
        elif cut.get("type") == "Digits" and cut["individual_digits"]:
            found.append(r"\p{N}")
        elif cut.get("type") == "ByteLevel" and cut["use_regex"]:
            found.append(GPT2)
    return tuple(found)
