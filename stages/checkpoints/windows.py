"""The sliding windows of a model's layers, derived from config.json by transformers' rules."""

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


def layer_windows(path: Path, config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return the sliding window by layer in tokens, including the attending token; None for full attention.

    `config` has the family's defaults for missing keys.
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
