"""Small GGUF files, written with llama.cpp's gguf package in the layout of its converter."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from stages.checkpoints.loading import load_causal_lm

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("Ġthe", "he", "in", "th", "er", "Ġa", "Ġt", "12")
MERGES = ("h e", "i n", "e r", "t h", "Ġ a", "Ġ t", "Ġt he", "1 2")
USER_DEFINED = "<tool>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*CONTROLS, *BYTES, *WORDS, USER_DEFINED]
TYPES = [3] * len(CONTROLS) + [1] * (len(BYTES) + len(WORDS)) + [4]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"

SENTENCE_PIECES = ["▁t", "he", "▁the", "in", "er", "▁a", "th", "ther", "▁there"]
"""Tokens in merge order."""
CHARACTERS = list("▁abcdefghijklmnopqrstuvwxyz.,")
SENTENCEPIECE_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCE_PIECES, *CHARACTERS]
SENTENCEPIECE_TYPES = [2, 3, 3] + [6] * 256 + [1] * (len(SENTENCE_PIECES) + len(CHARACTERS))
SENTENCEPIECE_SCORES = [0.0] * 259 + [-float(i) for i in range(len(SENTENCE_PIECES) + len(CHARACTERS))]

VOCAB_SIZE = 320
"""Rows of the embedding: more rows than tokens, as in many models."""

ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Gemma3": "gemma3"}

LAYER_TYPES = ("sliding_attention", "full_attention")


def random_model(family: str, **changes: Any) -> PreTrainedModel:
    """Return a random two-layer float32 model. Every call returns the same weights."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rope_theta": 50000.0,
    }
    settings: dict[str, dict[str, Any]] = {
        "Mistral": {"sliding_window": None},
        "Qwen3": {"head_dim": 32},
        "Gemma3": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "layer_types": list(LAYER_TYPES)},
    }
    options |= settings.get(family, {}) | changes
    config = getattr(transformers, f"{family}{'Text' * (family == 'Gemma3')}Config")(**options)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, values in model.named_parameters():
        if values.dim() == 1:  # Biases start as 0 and norms as 1, which would hide their loss.
            torch.nn.init.uniform_(values, 0.5 if "norm" in name else -0.5, 1.5)
    return model


def write_gguf(path: Path, family: str, model: PreTrainedModel, kind: str = "F32", **metadata: Any) -> Path:
    """Write a model as a GGUF. Also replace the model's weights by the file's dequantized values.

    Args:
        path: The file.
        family: Key of ARCHITECTURES.
        model: A float32 model.
        kind: Type of the matrices; vectors are F32.
        metadata: Metadata keys -> values, which override the defaults (a byte-level BPE with `pre=gpt-2`); None omits a key.
            `__` in a key stands for `.`.
    """
    architecture, config = ARCHITECTURES[family], model.config
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    values: dict[str, Any] = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{architecture}.rope.freq_base": 50000.0,
        f"{architecture}.rope.dimension_count": head_dim,
        **(sentencepiece_metadata() if family == "Gemma3" else bpe_metadata()),
    }
    if family == "Gemma3":
        values |= {"gemma3.attention.sliding_window": config.sliding_window, "gemma3.attention.sliding_window_pattern": 2}
    for key, value in (values | {key.replace("__", "."): value for key, value in metadata.items()}).items():
        _put(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, suffix = name.rpartition(".")
        rows = tensor.float().numpy() + (family == "Gemma3" and tensor.dim() == 1)
        rotated = {"q_proj.weight": heads, "k_proj.weight": kv_heads}.get(".".join(name.split(".")[-2:]))
        rotated = rotated if architecture == "llama" else None
        if rotated:  # in the order of llama.cpp's converter
            rows = rows.reshape(rotated, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        stored = gguf.GGMLQuantizationType[kind if rows.ndim > 1 else "F32"]
        data = quantize(np.ascontiguousarray(rows), stored)
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", data, raw_dtype=stored)
        dequantized = dequantize(data, stored).reshape(rows.shape)
        if rotated:
            dequantized = dequantized.reshape(rotated, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        if family == "Gemma3" and rows.ndim == 1:
            dequantized = dequantized - 1
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(dequantized)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_checkpoint(path: Path, checkpoint: Path, kind: str = "F16") -> Path:
    """Write a Llama checkpoint with a byte-level BPE as a GGUF.

    The file's tokenizer splits texts as GPT-2's does. With it the model answers worse than with the checkpoint's tokenizer.
    """
    model = load_causal_lm(checkpoint, dtype=torch.float32)
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    ids, controls = tokenizer["model"]["vocab"], {token["content"] for token in tokenizer["added_tokens"]}
    keys: dict[str, Any] = {
        "llama__rope__freq_base": float(model.config.rope_parameters["rope_theta"]),
        "tokenizer__ggml__tokens": sorted(ids, key=ids.get),
        "tokenizer__ggml__token_type": [3 if token in controls else 1 for token in sorted(ids, key=ids.get)],
        "tokenizer__ggml__merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer__ggml__bos_token_id": model.config.bos_token_id,
        "tokenizer__ggml__eos_token_id": model.config.eos_token_id,
        "tokenizer__ggml__add_bos_token": True,
        "tokenizer__chat_template": None,
    }
    return write_gguf(path, "Llama", model, kind, **keys)


def bpe_metadata() -> dict[str, Any]:
    """Return the tokenizer.* keys of a byte-level BPE of TOKENS."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def sentencepiece_metadata() -> dict[str, Any]:
    """Return the tokenizer.* keys of a SentencePiece BPE like Gemma's."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SENTENCEPIECE_TOKENS,
        "tokenizer.ggml.token_type": SENTENCEPIECE_TYPES,
        "tokenizer.ggml.scores": SENTENCEPIECE_SCORES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "rope_freqs":
        writer.add_tensor("rope_freqs.weight", np.asarray(value, np.float32))
    elif value is not None:
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if kind is gguf.GGUFValueType.INT32 else kind)
