"""What model a Hugging Face checkpoint is: its config.json, checked."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.files import read_json, refusal, refuse_escape, require_file, tokenizer_files, weight_files, wrong
from pipeline.checkpoint.windows import layer_windows
from pipeline.core.errors import UserError, short
from pipeline.core.kv import KVShape

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Supported decoders: class -> the model_type by which transformers loads it."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Supported rotary embeddings. Their frequencies do not depend on the running length: a graph holds them as constants."""

ROPE_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kind of rotary scaling -> the numbers that it takes."""
ROPE_TEXTS = ("rope_type", "type")

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
}
"""Values that transformers takes for keys that config.json leaves out, by model_type; only those that are read here."""

DTYPES = ("float32", "float16", "bfloat16", "float64")
"""Types of weights, by torch's names."""

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "mish")
"""Activations of transformers that decoders use."""

MOST_LAYERS = 4096
LARGEST = 1 << 30
"""No model has as many layers, and no other size of one comes near this."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that passed the checks; files are named relative to `path`."""

    path: Path
    architecture: str
    shape: KVShape
    q_heads: int
    vocab_size: int
    mlp_columns: object
    """intermediate_size of config.json, unchecked: only an engine on several GPUs asks for it."""
    max_positions: int
    """Longest sequence that the model's rotary embedding was made for, in tokens."""
    rope_scaling: str | None
    """Kind of rotary scaling (`llama3`, `yarn`, ...), None for plain rotary embeddings."""
    weight_files: tuple[str, ...]
    other_files: tuple[str, ...]
    """config.json, generation_config.json, the shard index and the tokenizer's files, as far as they exist."""


def inspect_checkpoint(path: Path) -> CheckpointInfo:
    """Read and check a checkpoint directory.

    Raises:
        UserError: naming `model.path`, what is wrong and what to do.
    """
    if not path.is_dir():
        raise refusal(path, "no such directory; give a local Hugging Face checkpoint, or a GGUF file")
    config = read_json(path, "config.json")
    _architecture(path, config)
    weights, index = weight_files(path)
    tokenizer = tokenizer_files(path)
    generation = ("generation_config.json",) if os.path.lexists(path / "generation_config.json") else ()
    other_files = ("config.json", *generation, *index, *tokenizer)
    for name in (*weights, *other_files):
        require_file(path, name)
        refuse_escape(path, name)
    return describe_checkpoint(path, config, weights, other_files)


def describe_checkpoint(
    path: Path, config: dict[str, Any], weight_files: tuple[str, ...], other_files: tuple[str, ...]
) -> CheckpointInfo:
    """Check the content of a config.json, and return it with the checkpoint's files.

    Raises:
        UserError: naming `model.path`, what is wrong and what to do.
    """
    architecture = _architecture(path, config)
    if config.get("quantization_config") is not None:
        raise refusal(path, "the checkpoint is already quantized; give the unquantized one")
    config = DEFAULTS[ARCHITECTURES[architecture]] | config
    rope_scaling = _rope_scaling(path, config)
    _check_values(path, config)
    integer(path, config, "hidden_size")
    shape, q_heads = attention_shape(path, config)
    vocab_size, pad = integer(path, config, "vocab_size"), config.get("pad_token_id")
    if type(pad) is int and pad >= vocab_size:
        raise wrong(path, config, "pad_token_id", f"one of the {vocab_size:,} tokens")
    return CheckpointInfo(
        path=path,
        architecture=architecture,
        shape=shape,
        q_heads=q_heads,
        vocab_size=vocab_size,
        mlp_columns=config.get("intermediate_size"),
        max_positions=_positions(path, config),
        rope_scaling=rope_scaling,
        weight_files=weight_files,
        other_files=other_files,
    )


def attention_shape(path: Path, config: dict[str, Any]) -> tuple[KVShape, int]:
    """Return what the cache of a decoder of any family stores, and how many query heads a layer has.

    Args:
        path: Of the checkpoint, for errors.
        config: The content of config.json over DEFAULTS.

    Raises:
        UserError: naming `model.path`, the key, and what to do.
    """
    layers, q_heads = (integer(path, config, key) for key in ("num_hidden_layers", "num_attention_heads"))
    kv_heads = integer(path, config, "num_key_value_heads", default=q_heads)
    if config.get("head_dim") is not None:
        head_dim = integer(path, config, "head_dim")
    else:
        head_dim, rest = divmod(integer(path, config, "hidden_size"), q_heads)
        if rest:
            raise refusal(path, f"config.json has no head_dim, and {q_heads} heads do not divide hidden_size; add head_dim")
    if q_heads % kv_heads:
        raise refusal(path, f"num_key_value_heads={kv_heads} must divide num_attention_heads={q_heads}")
    if head_dim % 2:
        raise refusal(path, f"head_dim={head_dim} must be even (rotary embeddings, packed INT4)")
    windows = layer_windows(path, config, layers)
    return KVShape(layers, kv_heads, head_dim, windows if any(windows) else ()), q_heads


def _architecture(path: Path, config: dict[str, Any]) -> str:
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1:
        raise wrong(path, config, "architectures", "a list of one class")
    architecture = str(classes[0])[:100]
    if architecture not in ARCHITECTURES:
        raise refusal(path, f"{short(architecture)} is not supported; use one of {', '.join(ARCHITECTURES)}")
    # transformers picks the class by model_type alone.
    if config.get("model_type") != ARCHITECTURES[architecture]:
        raise wrong(path, config, "model_type", f"{ARCHITECTURES[architecture]} for {architecture}")
    return architecture


def integer(path: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return a size of config.json. Raises UserError for one that is missing, without a default, or is none."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    most = MOST_LAYERS if key == "num_hidden_layers" else LARGEST
    if type(value) is not int or not 0 < value <= most:
        raise wrong(path, config, key, f"a positive integer, at most {most:,}")
    return value


def _positions(path: Path, config: dict[str, Any]) -> int:
    """Return the longest sequence: scaled where the length before scaling is given, as Qwen gives YaRN's."""
    given = integer(path, config, "max_position_embeddings")
    scaling = config.get("rope_scaling") or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    return max(given, int(original * factor)) if original and factor else given


def _is_number(value: object, lowest: float = 0) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and lowest <= value < math.inf


def _is_positive(value: object) -> bool:
    return value is None or (_is_number(value) and value != 0)


def _is_token(value: object) -> bool:
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    return all(type(number) is int and -1 <= number < LARGEST for number in numbers)


RULES: tuple[tuple[tuple[str, ...], str, Callable[[object], bool]], ...] = (
    (("hidden_act",), f"one of {', '.join(ACTIVATIONS)}", lambda value: value in ACTIVATIONS),
    (("rms_norm_eps", "rope_theta"), "a positive number", _is_positive),
    (("tie_word_embeddings", "attention_bias", "mlp_bias"), "true or false", lambda value: type(value) is bool),
    (("dtype", "torch_dtype"), f"one of {', '.join(DTYPES)}", lambda value: value in (None, "auto", *DTYPES)),
    (("bos_token_id", "eos_token_id", "pad_token_id"), "a token's number", _is_token),
)
"""What the model's arithmetic takes from config.json besides its sizes; what is not given has a default."""


def _check_values(path: Path, config: dict[str, Any]) -> None:
    for keys, needed, holds in RULES:
        for key in keys:
            if key in config and not holds(config[key]):
                raise wrong(path, config, key, needed)


def _rope_scaling(path: Path, config: dict[str, Any]) -> str | None:
    if "rope_parameters" in config:
        raise refusal(path, "config.json has rope_parameters; put rope_theta and, as rope_scaling, the rest at the top level")
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise wrong(path, config, "rope_scaling", "an object or null")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise refusal(path, f"config.json: rope_scaling.rope_type={short(kind)} is not supported; use one of {known}")
    for key, value in scaling.items():
        if key not in ROPE_TEXTS and not (value is None or type(value) is bool or _is_number(value)):
            raise refusal(path, f"config.json: rope_scaling.{short(key)} must be a number, got {short(value)}")
    missing = [key for key in ROPE_NEEDS.get(kind, ()) if not scaling.get(key)]
    if missing:
        raise refusal(path, f"config.json: rope_scaling.{missing[0]} is missing, which {kind} needs; add it")
    return None if kind == "default" else str(kind)


def rope_at_top_level(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json's content with the rotary parameters as rope_theta and rope_scaling at the top level.

    transformers 5 writes rope_parameters and reads both. transformers 4, which TensorRT-LLM 1.2 has, reads the top level alone.
    """
    rope = dict(config.get("rope_parameters") or {})
    if not rope:
        return config
    flat = {key: value for key, value in config.items() if key != "rope_parameters"}
    flat["rope_theta"] = rope.pop("rope_theta")
    flat["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return flat


def refuse_sliding_layers(info: CheckpointInfo, reason: str) -> None:
    """Raise UserError for a model with layers that attend to their latest tokens alone, on a backend that is not known to."""
    slid = [window for window in info.shape.windows if window is not None]
    if slid:
        raise UserError(
            f"model.path={info.path}: config.json: {len(slid)} of {info.shape.layers} layers attend to their last {max(slid)} "
            f"tokens alone: {reason}; use backend=onnxruntime, or set sliding_window to null if no sequence gets longer"
        )
