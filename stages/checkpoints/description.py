"""Reads and checks the config.json of a Hugging Face checkpoint, and describes its model with its sliding windows."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.checkpoints.families import ARCHITECTURES, FAMILIES, LARGER_MODEL, OTHER_CACHES
from stages.checkpoints.files import (
    GENERATION,
    check_file,
    end_tokens,
    read_json,
    refusal,
    tokenizer_files,
    weight_files,
    wrong_value,
)
from stages.checkpoints.places import absence
from stages.checkpoints.quantized import MODELOPT_FILE, Quantized, read_quantized
from stages.checkpoints.rope import FULL, SLIDING, is_number, read_rope
from stages.core.errors import UserError, short
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVShape

DTYPES = ("float32", "float16", "bfloat16", "float64")
"""Torch names of the supported weight types."""

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "mish")
"""Activation functions of transformers that decoders use."""

MAX_LAYERS = 4096
"""Maximum number of layers or of experts, far above any model's."""
MAX_SIZE = 1 << 30
"""Maximum of any other size, far above any model's."""

TOKENS = ("bos_token_id", "pad_token_id")
"""Keys of tokens besides those that end an answer, which `end_tokens` checks."""

LENGTHS = ("n_positions", "seq_length", "seq_len", "max_seq_len", "max_seq_length", "max_sequence_length")
"""Other families' names of max_position_embeddings. vLLM serves no more than the smallest of all."""

PATTERNS = ("sliding_window_pattern", "max_window_layers")
"""Keys that select the sliding layers if layer_types is missing."""

MAX_WINDOW = 1 << 22
"""Maximum window in tokens, far above the context of any model."""

COUNTS = ("num_hidden_layers", "num_experts", "num_local_experts", "num_experts_per_tok")
SIZES_OF_EXPERTS = (*COUNTS[1:], "moe_intermediate_size", "shared_expert_intermediate_size")
NO_SHARED_EXPERT = ("shared_expert_intermediate_size", 0)
"""Key and value in config.json of models without a shared expert, such as Qwen3-Coder."""

ADAPTER = "adapter_config.json"
"""File of a LoRA adapter, which transformers would apply to the weights if PEFT is installed."""

IGNORED_KEYS = ("num_labels", "id2label", "label2id", "return_dict", "use_return_dict", "torchscript")
"""Keys of config.json that do not affect the model: tables of a classifier's labels, and the form of transformers' results."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that passed the checks. File names are relative to `path`."""

    path: Path
    architecture: str
    shape: KVShape
    q_heads: int
    vocab_size: int
    intermediate_size: int
    max_positions: int
    """Maximum sequence length of the model's rotary embedding in tokens."""
    rope_scaling: str | None
    """Kind of rotary scaling (`llama3`, `yarn`, ...); None for plain rotary embeddings."""
    features: tuple[str, ...]
    """Attention features of the family, other than windows, that this model uses, for example attn_logit_softcapping."""
    weight_files: tuple[str, ...]
    other_files: tuple[str, ...]
    """config.json and the existing files of generation, quantization, the shard index and the tokenizer."""
    quantized: Quantized | None = None
    """Storage format of quantized weights; None if the weights are not quantized."""


def inspect_checkpoint(path: Path) -> CheckpointInfo:
    if not path.is_dir():
        raise refusal(path, absence(path))
    if os.path.lexists(path / ADAPTER):
        raise refusal(path, f"{ADAPTER}: adapters are not applied; merge it into the weights (merge_and_unload), or remove it")
    config = read_config(path)
    _architecture(path, config)  # an unsupported model is refused before its files are checked
    weights, index = weight_files(path)
    tokenizer = tokenizer_files(path)
    more_files = (name for name in (GENERATION, MODELOPT_FILE) if os.path.lexists(path / name))
    other_files = ("config.json", *more_files, *index, *tokenizer)
    for name in (*weights, *other_files):
        check_file(path, name)
    info = describe_checkpoint(path, config, weights, other_files)
    end_tokens(path, info.vocab_size)
    return info


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's config.json without keys that do not affect the model.

    A missing quantization_config is read from compression_config, which is its older name, or from ModelOpt's file. Raises
    UserError if the decoder is a part of a larger model.
    """
    content = read_json(path, "config.json")
    # Keys with _implementation may name a kernel on a hub, which is code.
    config = {key: value for key, value in content.items() if "_implementation" not in key and key not in IGNORED_KEYS}
    older = config.pop("compression_config", None)  # older name of quantization_config, which vLLM still reads
    if older is not None and config.get("quantization_config") is None:
        config["quantization_config"] = older
    if "quantization_config" not in config and (path / MODELOPT_FILE).is_file():
        declared = read_json(path, MODELOPT_FILE).get("quantization")
        if isinstance(declared, dict):
            declared = {**declared, "ignore": declared.get("exclude_modules") or [], "quant_method": "modelopt"}
        config["quantization_config"] = declared
    for key in LARGER_MODEL:
        if config.get(key) is not None:
            raise refusal(path, f"config.json: {key}: the decoder is a part of a larger model; save only its language model")
    return config


def describe_checkpoint(
    path: Path, config: dict[str, Any], weight_files: tuple[str, ...], other_files: tuple[str, ...]
) -> CheckpointInfo:
    architecture = _architecture(path, config)
    quantized = read_quantized(path, config)
    family = FAMILIES[ARCHITECTURES[architecture]]
    config = family.with_defaults(config)
    _check_values(path, config)
    experts_sizes = [key for key in SIZES_OF_EXPERTS if key in config and (key, config[key]) != NO_SHARED_EXPERT]
    for key in ("hidden_size", *experts_sizes):
        integer(path, config, key)
    experts, chosen = config.get("num_experts", config.get("num_local_experts")), config.get("num_experts_per_tok")
    if experts is not None and chosen is not None and chosen > experts:
        raise refusal(path, f"config.json: num_experts_per_tok={chosen} exceeds the number of experts, {experts}; correct it")
    shape, q_heads = attention_shape(path, config)
    rope = read_rope(path, config)
    vocab_size = integer(path, config, "vocab_size")
    for key in TOKENS:
        token = config.get(key)
        if type(token) is int and not -1 <= token < vocab_size:
            raise wrong_value(path, config, key, f"one of the {vocab_size:,} tokens")
    length = integer(path, config, "max_position_embeddings")
    for key in LENGTHS:
        if is_number(config.get(key), highest=length - 1):
            raise refusal(
                path, f"config.json: {key}={config[key]} is below max_position_embeddings={length}; remove it or lower that"
            )
    return CheckpointInfo(
        path=path,
        architecture=architecture,
        shape=shape,
        q_heads=q_heads,
        vocab_size=vocab_size,
        intermediate_size=integer(path, config, "intermediate_size"),
        max_positions=rope.positions(length),
        rope_scaling=rope.scaling,
        features=tuple(key for key in family.features if config.get(key, True) is not None),
        weight_files=weight_files,
        other_files=other_files,
        quantized=quantized,
    )


def attention_shape(path: Path, config: dict[str, Any]) -> tuple[KVShape, int]:
    """Return a decoder's cache shape and query heads per layer. `config` has the family's defaults for missing keys."""
    layers, q_heads = (integer(path, config, key) for key in ("num_hidden_layers", "num_attention_heads"))
    kv_heads = integer(path, config, "num_key_value_heads", default=q_heads)
    if config.get("head_dim") is not None:
        head_dim = integer(path, config, "head_dim")
    else:
        head_dim, remainder = divmod(integer(path, config, "hidden_size"), q_heads)
        if remainder:
            raise refusal(path, f"config.json has no head_dim, and {q_heads} heads do not divide hidden_size; add head_dim")
    if q_heads % kv_heads:
        raise refusal(path, f"num_key_value_heads={kv_heads} must divide num_attention_heads={q_heads}")
    if head_dim % 2:
        raise refusal(path, f"head_dim={head_dim} must be even (rotary embeddings, packed INT4)")
    rotated = config.get("no_rope_layers")
    if rotated is not None and not (isinstance(rotated, list) and len(rotated) == layers and all(x in (0, 1) for x in rotated)):
        raise wrong_value(path, config, "no_rope_layers", f"null, or a list with 0 or 1 for each of the {layers} layers")
    windows = layer_windows(path, config, layers)
    return KVShape(layers, kv_heads, head_dim, windows if any(windows) else ()), q_heads


def layer_windows(path: Path, config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return the sliding window by layer in tokens, including the attending token; None for full attention.

    The rules are those of transformers. `config` has the family's defaults for missing keys.
    """
    types, window = _layer_types(path, config, layers), config.get("sliding_window")
    if SLIDING in types and (type(window) is not int or not 0 < window <= MAX_WINDOW):
        expected = f"an integer from 1 to {MAX_WINDOW:,} in a model with sliding_attention layers"
        raise wrong_value(path, config, "sliding_window", expected)
    return tuple(window if layer_type == SLIDING else None for layer_type in types)


def _layer_types(path: Path, config: dict[str, Any], layers: int) -> list[str]:
    """Return the layer types that transformers uses. Raises UserError if layer_types contradicts a key with precedence."""
    layer_types, window, kind = config.get("layer_types"), config.get("sliding_window"), config["model_type"]
    family = FAMILIES[kind]
    if layer_types is not None:
        _check_layer_types(path, layer_types, layers)
    uses = config.get("use_sliding_window")
    if family.uses_flag and uses not in (None, True, False):
        raise wrong_value(path, config, "use_sliding_window", "true or false")
    slides = bool(uses) or not family.uses_flag
    decisive: str | None = "use_sliding_window" if family.uses_flag else "sliding_window"
    if family.windows == "none" or not slides or (window is None and (family.uses_flag or family.windows == "every")):
        types = [FULL] * layers
    elif family.windows == "every":
        types = [SLIDING] * layers
    else:
        _check_patterns(path, config)
        types = [SLIDING if family.slides(config, layer) else FULL for layer in range(layers)]
        decisive = next((key for key in PATTERNS if config.get(key) != family.defaults.get(key)), None)
    if layer_types not in (None, types):
        if decisive is None:
            return list(layer_types)
        raise refusal(
            path,
            f"config.json: layer_types contradicts {decisive}={short(config.get(decisive))} in a {kind}; keep the "
            "one that the weights were trained with",
        )
    if family.windows == "none" and window is not None and uses is not False:
        raise wrong_value(path, config, "sliding_window", f"null in a model of type {kind}, whose layers have full attention")
    return types


def _check_layer_types(path: Path, types: object, layers: int) -> None:
    if not isinstance(types, list) or len(types) != layers:
        raise refusal(path, f"config.json: layer_types must name each of the {layers} layers, got {short(repr(types), 40)}")
    choices = (FULL, SLIDING)
    unread = [layer_type for layer_type in types if layer_type not in choices]
    if unread:
        problem = f"config.json: layer_types has {short(repr(unread[0]), 40)}, which kvgate does not support"
        raise refusal(path, f"{problem}; use a model of {' and '.join(choices)} layers")


def _check_patterns(path: Path, config: dict[str, Any]) -> None:
    """Raise UserError for invalid values of the keys that select the sliding layers if layer_types is missing."""
    first = config.get("max_window_layers", 0)
    if type(first) is not int or first < 0:
        raise wrong_value(path, config, "max_window_layers", "an integer of at least 0, the first layer that slides")
    for key in ("sliding_window_pattern", "no_rope_layer_interval"):
        period = config.get(key, 1)
        if type(period) is not int or period < 1:
            raise wrong_value(path, config, key, "a positive integer")


def _architecture(path: Path, config: dict[str, Any]) -> str:
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1:
        raise wrong_value(path, config, "architectures", "a list of one class")
    architecture = str(classes[0])[:100]
    for key, reason in OTHER_CACHES.items():
        if config.get(key):
            raise refusal(path, f"config.json: {key}={short(config[key])}: {reason}; use another model")
    if architecture not in ARCHITECTURES:
        raise refusal(path, f"{short(architecture)} is not supported; use one of {', '.join(ARCHITECTURES)}")
    # transformers selects the class by model_type only.
    if config.get("model_type") != ARCHITECTURES[architecture]:
        raise wrong_value(path, config, "model_type", f"{ARCHITECTURES[architecture]} for {architecture}")
    return architecture


def integer(path: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return a size from config.json. Raises UserError if it is not a positive integer, or missing without a default."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    maximum = MAX_LAYERS if key in COUNTS else MAX_SIZE
    if type(value) is not int or not 0 < value <= maximum:
        raise wrong_value(path, config, key, f"a positive integer, at most {maximum:,}")
    return value


MULTIPLIERS = ("attention_multiplier", "logits_scaling", "embedding_multiplier", "residual_multiplier")
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
POSITIVE = {
    **dict.fromkeys(("query_pre_attn_scalar", "clip_qkv", *MULTIPLIERS, *SOFTCAPS), sys.float_info.max),
    **dict.fromkeys(("rms_norm_eps", "norm_epsilon", "partial_rotary_factor"), 1.0),
}
"""Optional numbers of config.json that affect the model's arithmetic -> their maximum; they are above 0."""
BASES = ("rope_theta", "rope_local_base_freq")
CHOICES = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ACTIVATIONS),
    **dict.fromkeys(("dtype", "torch_dtype"), (None, *DTYPES)),
}
"""Optional texts of config.json that affect the model's arithmetic -> their values. transformers checks all other types."""


def _check_values(path: Path, config: dict[str, Any]) -> None:
    for key, highest in POSITIVE.items():
        value = config.get(key)
        if value is not None and not (is_number(value, highest=highest) and value):
            raise wrong_value(path, config, key, "a number above 0" + (", at most 1" if highest == 1 else ""))
    for key in BASES:
        if config.get(key) is not None and not is_number(config[key], 1):
            raise wrong_value(path, config, key, "a number of at least 1")
    for key, values in CHOICES.items():
        if key in config and config[key] not in values:
            raise wrong_value(path, config, key, f"one of {', '.join(filter(None, values))}")
    for old_key, new_key in (("torch_dtype", "dtype"), ("hidden_act", "hidden_activation")):
        old, new = config.get(old_key), config.get(new_key)
        if old is not None and new is not None and old != new:
            raise refusal(path, f"config.json: {old_key}={old} contradicts {new_key}={new}; keep the one of the weights")


def refuse_weights(info: CheckpointInfo, weights: WeightsFormat) -> None:
    """Raise UserError if the weights are quantized already, or if ModelOpt's exports of the family are untested."""
    if weights != "none" and info.quantized is not None:
        raise UserError(f"weights.format={weights}: the weights are {info.quantized.title} already; set weights=none")
    if weights != "none" and not FAMILIES[ARCHITECTURES[info.architecture]].quantizable:
        raise UserError(f"weights.format={weights}: ModelOpt's exports of {info.architecture} are not tested; set weights=none")


def refuse_other_attention(info: CheckpointInfo, reason: str) -> None:
    """Raise UserError for a model with sliding windows or attention features. `reason`: why the backend lacks them."""
    windows = [window for window in info.shape.windows if window is not None]
    if windows:
        raise UserError(
            f"model.path={info.path}: config.json: {len(windows)} of {info.shape.layers} layers attend only to their last "
            f"{max(windows)} tokens: {reason}; use backend=onnxruntime, or set sliding_window=null if no sequence gets longer"
        )
    if info.features:
        raise UserError(
            f"model.path={info.path}: config.json: the attention of {info.architecture} has {' and '.join(info.features)}: "
            f"{reason}; use backend=onnxruntime"
        )
