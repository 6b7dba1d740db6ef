"""Conversion of a GGUF's metadata and tensor list to the description of a Hugging Face checkpoint. Weights are not read.

llama.cpp writes Mistral as `general.architecture=llama`, because both compute the same. Such a file becomes a Llama.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.checkpoints.description import CheckpointInfo, describe_checkpoint
from stages.checkpoints.families import FAMILIES
from stages.checkpoints.files import SINGLE
from stages.checkpoints.gguf.header import Header, read_header
from stages.checkpoints.gguf.vocabulary import Vocabulary, read_vocabulary
from stages.checkpoints.loading import expected_tensors
from stages.checkpoints.rope import FULL, SLIDING

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
"""general.architecture -> the equivalent model_type of transformers."""

SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
READ_KEYS = {
    *SIZES,
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "vocab_size",
}
GEMMA3_KEYS = {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}
"""Additional keys that are read only for Gemma 3."""
KEYS_WITHOUT_EFFECT: dict[str, Any] = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scale_linear": 1.0,
    "rope.scaling.finetuned": None,
    "tensor_data_layout": "Meta AI original pth",
}
"""Keys without effect at this value (None: at any value)."""

GEMMA3_27B = 62
"""Number of layers of Gemma 3 27B, whose queries are scaled by hidden_size / num_attention_heads instead of head_dim. A GGUF
does not store the scale; llama.cpp recognizes the model by the number of layers too."""

MAX_VALUE = 2**40
"""Maximum of sizes and frequencies, far above any model's."""

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with the divisors of the rotary frequencies of Llama 3.1 and later: head_dim / 2 floats."""
LLAMA3_ROPE: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary parameters of Llama 3.1 and later. A GGUF stores only the resulting divisors."""


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF that can be converted to a checkpoint."""

    header: Header
    config: dict[str, Any]
    """Content of config.json, without the type of the weights."""
    vocabulary: Vocabulary
    info: CheckpointInfo
    """Description of the resulting checkpoint, with the path of the GGUF."""

    @cached_property
    def names(self) -> dict[str, str]:
        """Name of a tensor in the GGUF -> its name in the checkpoint.

        Raises UserError unless the file has exactly the tensors of the model. The first use imports torch and transformers.
        """
        from gguf.constants import MODEL_ARCH_NAMES
        from gguf.tensor_mapping import get_tensor_name_map

        header, architecture = self.header, self.header.metadata["general.architecture"]
        number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
        mapping = get_tensor_name_map(number, self.config["num_hidden_layers"])
        names: dict[str, str] = {}
        for target, shape in expected_tensors(header.path, self.config).items():
            name = str(mapping.get_name(target, (".weight", ".bias")))
            tensor = header.tensors.get(name)
            if tensor is None or tensor.shape != shape:
                problem = f"has shape {tensor.shape}" if tensor else "is missing"
                raise header.error(
                    f"tensor {name} {problem}; a {architecture} of this size has shape {shape}; convert the model again"
                )
            names[name] = target
        unknown = sorted(header.tensors.keys() - names.keys() - {ROPE_FACTORS})
        if unknown or (ROPE_FACTORS in header.tensors and architecture != "llama"):
            raise header.error(
                f"tensor {(unknown or [ROPE_FACTORS])[0]} does not belong to a {architecture}; use a model without it"
            )
        return names


def inspect_gguf(path: Path) -> GGUFModel:
    """Read and check the header of a GGUF, which is cheap."""
    header = read_header(path)
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
        raise header.error(f"general.architecture={architecture} is not supported; use one of {', '.join(MODEL_TYPES)}")
    _refuse_unknown_metadata(header, architecture)
    vocabulary = read_vocabulary(header)
    if architecture == "gemma3" and (vocabulary.splitter is not None or vocabulary.space_prefix):
        raise header.error(
            "Gemma 3 has a tokenizer of kind llama that puts no space before a text (tokenizer.ggml.add_space_prefix=false), "
            "but the file has another tokenizer; convert the model again"
        )
    config = _config(header, architecture, vocabulary)
    info = describe_checkpoint(path, config, (SINGLE,), ("config.json", "tokenizer.json", "tokenizer_config.json"))
    return GGUFModel(header, config, vocabulary, info)


def pairs_neighbours(model_type: str) -> bool:
    """Return whether a GGUF's rotary embedding pairs adjacent channels of queries and keys; transformers pairs halves."""
    return model_type == "llama"


def _refuse_unknown_metadata(header: Header, architecture: str) -> None:
    """Raise UserError for metadata that affects the model's computation and that the conversion does not support."""
    for key, value in header.metadata.items():
        name = key.removeprefix(f"{architecture}.")
        if name == key or name in READ_KEYS or (architecture == "gemma3" and name in GEMMA3_KEYS):
            continue
        if name not in KEYS_WITHOUT_EFFECT or KEYS_WITHOUT_EFFECT[name] not in (None, value):
            raise header.error(f"{key}={value!r:.40} is not supported; use another model, or its Hugging Face checkpoint")


def _config(header: Header, architecture: str, vocabulary: Vocabulary) -> dict[str, Any]:
    def value(name: str, kind: Any, default: Any = None) -> Any:
        entry: Any = header.metadata.get(f"{architecture}.{name}", default)
        if not (type(entry) is kind and 0 < entry < MAX_VALUE):
            raise header.error(f"{architecture}.{name} must be a positive {kind.__name__}, got {entry!r:.40}")
        return entry

    sizes = {name: value(key, int) for key, name in SIZES.items() if key != "attention.head_count_kv"}
    heads = sizes["num_attention_heads"]
    if sizes["num_hidden_layers"] > len(header.tensors):
        raise header.error(f"{architecture}.block_count={sizes['num_hidden_layers']}: it has {len(header.tensors)} tensors")
    embedding = header.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding else 0
    if rows < len(vocabulary.tokens):
        raise header.error(f"{len(vocabulary.tokens)} tokens, but token_embd.weight has {rows} rows; convert the model again")
    head_dim = value("attention.key_length", int, value("rope.dimension_count", int, sizes["hidden_size"] // heads))
    if not value("rope.dimension_count", int, head_dim) == head_dim == value("attention.value_length", int, head_dim):
        raise header.error("attention.key_length, attention.value_length and rope.dimension_count differ; use another model")
    config: dict[str, Any] = {
        "architectures": [FAMILIES[MODEL_TYPES[architecture]].architecture],
        "model_type": MODEL_TYPES[architecture],
        **sizes,
        "num_key_value_heads": value("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(value("rope.freq_base", float, 10000.0)),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": rows,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
        "pad_token_id": vocabulary.pad,
    }
    if architecture == "gemma3":
        config |= _gemma3(value, config)
    else:
        config["hidden_act"] = "silu"
    if architecture == "qwen2":
        config["use_sliding_window"] = False
    else:
        config["attention_bias"] = False
    config["rope_scaling"] = _rope_scaling(header, architecture, value, config)
    return config


def _gemma3(value: Any, config: dict[str, Any]) -> dict[str, Any]:
    layers, period = config["num_hidden_layers"], value("attention.sliding_window_pattern", int, 6)
    share = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": share if layers == GEMMA3_27B else config["head_dim"],
        "sliding_window": value("attention.sliding_window", int),
        "layer_types": [SLIDING if (layer + 1) % period else FULL for layer in range(layers)],
        "rope_local_base_freq": _shortest(value("rope.freq_base_swa", float, 10000.0)),
    }


def _rope_scaling(header: Header, architecture: str, value: Any, config: dict[str, Any]) -> dict[str, Any] | None:
    scaled = header.metadata.get(f"{architecture}.rope.scaling.factor", 1) != 1
    kind = header.metadata.get(f"{architecture}.rope.scaling.type", "linear" if scaled else "none")  # as in llama.cpp
    factors = ROPE_FACTORS in header.tensors
    if kind not in ("none", "linear", "yarn") or (factors and kind != "none"):
        suffix = f" with {ROPE_FACTORS}" if factors else ""
        raise header.error(f"{architecture}.rope.scaling.type={kind}{suffix} is not supported; use none, linear or yarn")
    if factors:
        return _llama3_scaling(header, config)
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest(value("rope.scaling.factor", float))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = value("rope.scaling.original_context_length", int)
    return scaling


def _llama3_scaling(header: Header, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rotary scaling of the file's factors; None if all are 1. Raises UserError if they are not Llama 3's."""
    tensor = header.tensors[ROPE_FACTORS]
    half = config["head_dim"] // 2
    if tensor.kind != "F32" or tensor.shape != (half,):
        raise header.error(f"{ROPE_FACTORS} must be {half} values of type F32, got {tensor.shape} of {tensor.kind}")
    factors = np.fromfile(header.path, "<f4", half, offset=tensor.offset)
    if (factors == 1).all():
        return None
    scaling = {"rope_type": "llama3", "factor": _shortest(factors.max()), **LLAMA3_ROPE}
    if not np.allclose(factors, _llama3_factors(half, config["rope_theta"], scaling), rtol=1e-4, atol=0):
        raise header.error(f"{ROPE_FACTORS} is not the rotary scaling of Llama 3; use the model's Hugging Face checkpoint")
    return scaling


def _llama3_factors(half: int, theta: float, scaling: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Return the divisors of the frequencies of `half` pairs (in transformers: `_compute_llama3_parameters`)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi * theta ** (np.arange(half) / half))
    smooth = ((turns - low) / (high - low)).clip(0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors


def _shortest(value: float) -> float:
    """Return the shortest decimal number that rounds to this float32, for example 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))
