"""The sliding windows of a model's layers, derived from config.json by transformers' rules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.checkpoints.families import FAMILIES
from stages.checkpoints.files import refusal, wrong_value
from stages.checkpoints.rope import FULL, SLIDING
from stages.core.errors import short

PATTERNS = ("sliding_window_pattern", "max_window_layers")
"""Keys that select the sliding layers if layer_types is missing."""

MAX_WINDOW = 1 << 22
"""Maximum window in tokens, far above the context of any model."""

WINDOW_KEYS = {FULL: None, SLIDING: "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Supported entry of layer_types -> the key of config.json with the layer's window in tokens."""


def layer_windows(path: Path, config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return the sliding window by layer in tokens, including the attending token; None for full attention.

    `config` has the family's defaults for missing keys. The model may be of any family.
    """
    types = _layer_types(path, config, str(config.get("model_type")), layers)
    windows = {layer_type: _window(path, config, layer_type) for layer_type in set(types)}
    return tuple(windows[layer_type] for layer_type in types)


def _window(path: Path, config: dict[str, Any], layer_type: str) -> int | None:
    key = WINDOW_KEYS[layer_type]
    if key is None:
        return None
    window = config.get(key)
    if type(window) is not int or not 0 < window <= MAX_WINDOW:
        raise wrong_value(path, config, key, f"an integer from 1 to {MAX_WINDOW:,} in a model with {layer_type} layers")
    return window


def _layer_types(path: Path, config: dict[str, Any], kind: str, layers: int) -> list[str]:
    """Return the layer types that transformers uses. Raises UserError if layer_types contradicts a key with precedence."""
    layer_types, window, family = config.get("layer_types"), config.get("sliding_window"), FAMILIES.get(kind)
    if layer_types is not None:
        _check_layer_types(path, layer_types, kind, layers)
    if family is None:
        unused = window is None or config.get("use_sliding_window") is False
        return layer_types or _types_by_rule(layers, None if unused else _unlisted_family_rule(path, config, kind))
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
        types = _types_by_rule(layers, lambda layer: family.slides(config, layer))
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


def _types_by_rule(layers: int, slides: Callable[[int], bool] | None) -> list[str]:
    return [SLIDING if slides is not None and slides(layer) else FULL for layer in range(layers)]


def _check_layer_types(path: Path, types: object, kind: str, layers: int) -> None:
    if not isinstance(types, list) or len(types) != layers:
        raise refusal(path, f"config.json: layer_types must name each of the {layers} layers, got {short(repr(types), 40)}")
    choices = list(WINDOW_KEYS) if kind.startswith("llama4") else list(WINDOW_KEYS)[:2]
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


def _unlisted_family_rule(path: Path, config: dict[str, Any], kind: str) -> Callable[[int], bool]:
    _check_patterns(path, config)
    period = config.get("sliding_window_pattern")
    if period is None:
        raise refusal(
            path,
            f"config.json: sliding_window={short(repr(config['sliding_window']), 40)} in a {kind} without layer_types: which "
            "layers slide is unknown; add layer_types with full_attention or sliding_attention for each layer",
        )
    return lambda layer: bool((layer + 1) % period)
