"""Refuses keys of config.json that transformers would silently ignore: misspelled keys, and keys of other families.

transformers reads only the keys of the family's configuration class. A model trained with another key would be loaded as
another model.
"""

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from stages.checkpoints.description import PATTERNS
from stages.checkpoints.families import FAMILIES
from stages.checkpoints.files import refusal
from stages.checkpoints.rope import TOP_LEVEL_KEYS
from stages.core.errors import short

DECODER_WORDS = {
    *("act", "activation", "alibi", "architecture", "attention", "attn", "bias", "bidirectional", "causal", "cla", "clip"),
    *("diffusion", "expert", "experts", "gamma", "gated", "glu", "interleave", "interleaved", "layernorm", "logit", "logits"),
    *("logn", "lora", "mla", "moe", "mrope", "multiplier", "mup", "nope", "norm", "normalization", "ntk", "prefix", "pruned"),
    *("qk", "qkv", "query", "residual", "rmsnorm", "rope", "rotary", "routed", "router", "scale", "scaling", "scoring"),
    *("share", "sharing", "sink", "sinks", "skip", "sliding", "softcap", "softcapping", "softmax", "swa", "theta", "window"),
    *("xpos", "yarn"),
    *("dim_model_base", "parallel_block", "position_embedding_type", "position_embeddings_type", "swiglu_limit", "topk_method"),
}
"""Words and groups of words in keys that change a decoder's computation."""
OTHER_DECODERS = {"alibi", "bidirectional", "diffusion", "mla", "moe", "nope", "xpos"}
"""Values that name an unsupported computation under any key, for example `position_encoding: alibi`."""
TRAINING_WORDS = {
    *("coef", "context", "dropout", "flash", "fp32", "fused", "grad", "init", "initializer", "jitter", "loss", "noise"),
    *("pdrop", "output_router"),
}
"""Words in keys that affect only training, speed or precision."""
COMPARED = {*TOP_LEVEL_KEYS, "rope_scaling", "sliding_window", "use_sliding_window", *PATTERNS}
"""Keys that other checks cover."""
SYNONYMS = ({"act", "activation"}, {"eps", "epsilon"})
"""Words with the same meaning in keys: `hidden_act` of one family is `activation_function` in another."""
WITHOUT_EFFECT: tuple[Any, ...] = (
    *(None, False, 0, 1, {}, []),
    *("default", "none", "full", "full_attention", "softmax", "greedy", "rope", "rotary", "causal", "mha", "gqa", "mqa"),
    *("sdpa", "eager"),
)
"""Values that leave every supported family's computation unchanged."""
ONLY_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("causal", "glu", "rope", "rotary", "scale attn", "scale attn weights", "no rope layers"), (None, True, 1)),
    "swiglu limit": (None, 7.0),
}
"""Words of a key, without `is`, `use` and `embedding(s)` -> its values without effect, which replace WITHOUT_EFFECT."""


def refuse_unread_keys(path: Path, config: dict[str, Any], loaded: Any, tensors: Iterable[str]) -> None:
    """Raise UserError for misspelled keys of config.json, and for unread keys that would change the computation.

    An unread key is accepted if a similar key with the same value is read.
    """
    kind = loaded.model_type
    known_keys = {*(field.name for field in fields(loaded)), *loaded.attribute_map, *loaded.attribute_map.values()}
    read_keys = known_keys | COMPARED | {FAMILIES[kind].local_base or ""}
    for key in sorted(config.keys() - read_keys):
        matches = get_close_matches(key, read_keys - config.keys(), 1, 0.9)
        if matches and not (key.startswith("_") or matches[0].startswith("_")):
            raise refusal(path, f"config.json: {short(key)} is not a known key, and {matches[0]} is missing; rename it")
    for key, same_meaning in _unread_keys(config, read_keys):
        present, value = [name for name in same_meaning if name in config], config[key]
        if same_meaning and not present:
            raise refusal(
                path, f"config.json: {short(key)} is not read in a model of type {kind}; write it as {min(same_meaning)}"
            )
        if _has_no_effect(_words(key), value, [config[name] for name in present], tensors):
            continue
        other = get_close_matches(key, (known_keys | COMPARED) & config.keys(), 1, 0.6)
        if isinstance(value, bool) or not other or config[other[0]] != value:
            raise refusal(
                path,
                f"config.json: {short(key)}={short(value)} is not read in a model of type {kind}; remove it "
                "if the weights were trained without it",
            )


def _unread_keys(config: dict[str, Any], known_keys: Set[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield unread keys that may change the computation, each with the known keys of the same meaning (`SYNONYMS`)."""
    for key, value in config.items():
        words = _words(key)
        synonyms = next((group for group in SYNONYMS if group.intersection(words)), set[str]())
        if key in known_keys or key.startswith("_") or _has_word(words, TRAINING_WORDS):
            continue
        unset = value is None or isinstance(value, bool)  # such as activation_checkpointing
        names_a_computation = isinstance(value, str) and value.lower() in OTHER_DECODERS
        if not unset if synonyms else names_a_computation or _has_word(words, DECODER_WORDS):
            yield key, [name for name in known_keys if synonyms.intersection(name.split("_"))]


def _words(key: str) -> list[str]:
    """Return the words of a key in lower case: `rope_theta`, `rope-theta` and `ropeTheta` have the same words."""
    return re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower())


def _has_word(words: list[str], vocabulary: Set[str]) -> bool:
    joined = f"_{'_'.join(words)}_"
    return any(f"_{word}_" in joined for word in vocabulary)


def _has_no_effect(words: list[str], value: Any, values: list[Any], tensors: Iterable[str]) -> bool:
    """Return whether the model computes the same with and without an unread key.

    A list of equal values, one by layer, counts as that value. `values` are the values of the family's own keys with the same
    meaning (`SYNONYMS`).
    """
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    if values:  # `gelu` also matches its approximations, such as `gelu_new`; swiglu is a gated silu
        value = {"swiglu": "silu", "geglu": "gelu"}.get(value, value) if isinstance(value, str) else value
        return value in (None, *values) or (isinstance(value, str) and any(str(item).startswith(value) for item in values))
    if isinstance(value, str) and {"norm", "normalization"}.intersection(words):
        norm = "layernorm" if "model.norm.bias" in tensors else "rmsnorm"
        return value.lower().replace("_", "") == norm
    harmless = ONLY_WITHOUT_EFFECT.get(" ".join(word for word in words if word not in ("is", "use", "embedding", "embeddings")))
    if "bias" in words:
        harmless = (None, False, any(".bias" in name for name in tensors))
    elif "qk" in words and any("norm" in word for word in words):
        harmless = (None, any(".q_norm." in name for name in tensors))
    harmless = harmless or WITHOUT_EFFECT
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in harmless)
