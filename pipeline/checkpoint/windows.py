"""Which layers of a model attend to their latest tokens alone: its config.json, read as transformers reads it."""

from pathlib import Path
from typing import Any

from pipeline.checkpoint.files import refusal, wrong
from pipeline.core.errors import UserError, short

WINDOW_IN_EVERY_LAYER = ("mistral", "mixtral", "phi3", "starcoder2")
WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""model_type -> every so many layers one has full attention; the others slide. `sliding_window_pattern` overrides it."""

LONGEST_WINDOW = 1 << 22
"""No model's context comes near it."""

WINDOW_KEYS = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""What layer_types may hold here -> the key of config.json with the layer's window."""


def layer_windows(path: Path, config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return the latest tokens that each layer attends to, the attending one included; None for all.

    Args:
        path: Of the checkpoint, for errors.
        config: The content of config.json over DEFAULTS, of any model family.
        layers: How many there are.

    Raises:
        UserError: naming `model.path`, the key, and what to do.
    """
    types = _layer_types(path, config, str(config.get("model_type")), layers)
    windows = {layer_type: _window(path, config, layer_type) for layer_type in set(types)}
    return tuple(windows[layer_type] for layer_type in types)


def _window(path: Path, config: dict[str, Any], layer_type: str) -> int | None:
    key = WINDOW_KEYS[layer_type]
    if key is None:
        return None
    window = config.get(key)
    if type(window) is not int or not 0 < window <= LONGEST_WINDOW:
        raise wrong(path, config, key, f"an integer from 1 to {LONGEST_WINDOW:,} in a model with {layer_type} layers")
    return window


def _layer_types(path: Path, config: dict[str, Any], kind: str, layers: int) -> list[str]:
    """What transformers takes each layer for. It reads no layer_types of Llama and Mistral, and no window of Qwen without
    use_sliding_window."""
    listed, window = config.get("layer_types"), config.get("sliding_window")
    if listed is not None:
        _check_layer_types(path, listed, kind, layers)
    if kind.startswith("qwen") and not _uses_window(path, config):
        window = None
    if kind == "llama" or (window is None and (listed is None or kind.startswith(("mistral", "qwen")))):
        types = ["full_attention"] * layers
    elif kind == "mistral" or (kind in WINDOW_IN_EVERY_LAYER and listed is None):
        types = ["sliding_attention"] * layers
    elif listed is not None:
        types = listed
    else:
        types = ["sliding_attention" if slides else "full_attention" for slides in _sliding(path, config, kind, layers)]
    if listed is not None and listed != types:
        key = "use_sliding_window" if kind.startswith("qwen") else "sliding_window"
        raise UserError(
            f"model.path={path}: config.json: layer_types holds {_other(listed, types)}, and transformers takes every layer of "
            f"this {kind} for {types[0]}, as {key} is {_short(config.get(key))}; make them agree"
        )
    return types


def _uses_window(path: Path, config: dict[str, Any]) -> bool:
    uses = config.get("use_sliding_window")
    if uses not in (None, True, False):
        raise wrong(path, config, "use_sliding_window", "true or false")
    return bool(uses)


def _check_layer_types(path: Path, listed: object, kind: str, layers: int) -> None:
    if not isinstance(listed, list) or len(listed) != layers:
        raise refusal(path, f"config.json: layer_types must name each of the {layers} layers, got {_short(listed)}")
    known = list(WINDOW_KEYS) if kind.startswith("llama4") else list(WINDOW_KEYS)[:2]
    unread = [layer_type for layer_type in listed if layer_type not in known]
    if unread:
        raise UserError(
            f"model.path={path}: config.json: layer_types holds {_short(unread[0])}, which is not read here; use a model of "
            f"{' and '.join(known)} layers"
        )


def _sliding(path: Path, config: dict[str, Any], kind: str, layers: int) -> list[bool]:
    """Which layers slide where no layer_types says it."""
    if kind.startswith("qwen"):
        first = config.get("max_window_layers", layers)
        if type(first) is not int or first < 0:
            raise wrong(path, config, "max_window_layers", "an integer of at least 0, the first layer that slides")
        return [layer >= first for layer in range(layers)]
    if kind in WINDOW_PATTERNS or "sliding_window_pattern" in config:
        period = config.get("sliding_window_pattern") or WINDOW_PATTERNS[kind]
        if type(period) is not int or period < 1:
            raise wrong(path, config, "sliding_window_pattern", "a positive integer")
        return [bool((layer + 1) % period) for layer in range(layers)]
    raise UserError(
        f"model.path={path}: config.json: sliding_window={_short(config['sliding_window'])} of {kind}, and no layer_types: "
        "which layers slide is not said; add layer_types, full_attention or sliding_attention for each layer"
    )


def _other(listed: list[str], types: list[str]) -> str:
    return next(kind for kind, applied in zip(listed, types, strict=True) if kind != applied)


def _short(value: object) -> str:
    return short(repr(value), 40)
