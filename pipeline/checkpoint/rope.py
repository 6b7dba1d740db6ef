"""The rotary embedding of a config.json, in every form that transformers 4.57 and 5 write: one description.

4.57 writes rope_theta and rope_scaling at the top level (Gemma 3 rope_local_base_freq for its sliding layers). 5 writes
rope_parameters, plain or by layer type, and reads both.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.files import refusal, wrong
from pipeline.core.errors import short

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Supported rotary embeddings. Their frequencies do not depend on the running length: a graph holds them as constants."""

ROPE_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kind of rotary scaling -> the numbers that it takes."""
MOST = 1e12
ROPE_TEXTS = ("rope_type", "type")

FULL, SLIDING = "full_attention", "sliding_attention"
BESIDE = ("rope_theta", "partial_rotary_factor")
"""What transformers 4 writes beside rope_scaling, not in it."""
OLD_KEYS = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
"""Layer type -> the key of 4.57 for its base. Without rope_local_base_freq both types share rope_theta."""


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of the layers with full attention, or of all of them."""

    scaling: str | None
    """Its kind (`llama3`, `yarn`, ...), None for plain rotary embeddings."""
    factor: float | None
    original_positions: float | None

    def positions(self, given: int) -> int:
        """Return the longest sequence in tokens.

        Args:
            given: max_position_embeddings. Qwen keeps the length before YaRN there, and no other kind of scaling says by how
                much a length grows: the factor of llama3 and linear divides frequencies.
        """
        if self.scaling != "yarn" or not self.factor or not self.original_positions:
            return given
        return max(given, int(self.original_positions * self.factor))


def read_rope(path: Path, config: Mapping[str, Any]) -> Rope:
    """Read the rotary embedding of a configuration.

    Args:
        path: Of the checkpoint, for errors.
        config: The content of config.json.

    Raises:
        UserError: A value is none, a kind is not supported or lacks a number, or two keys contradict each other.
    """
    old = _checked(path, "rope_scaling", config.get("rope_scaling"))
    given = config.get("rope_parameters")
    if given is not None and not isinstance(given, dict):
        raise wrong(path, dict(config), "rope_parameters", "an object or null")
    read: dict[str | None, dict[str, Any]] = {}
    for kind, typed in by_layer_type(given or {}).items():
        place = "rope_parameters" if kind is None else f"rope_parameters.{kind}"
        read[kind] = parameters = _checked(path, place, typed)
        base = OLD_KEYS[kind or FULL]
        pairs = [(base, config.get(base), "rope_theta")]
        pairs.append(("partial_rotary_factor", config.get("partial_rotary_factor"), "partial_rotary_factor"))
        if old and kind != SLIDING:
            pairs += [(f"rope_scaling.{key}", value, key) for key, value in old.items()]
        for name, value, key in pairs:
            if value is not None and parameters and value != parameters.get(key, value if key in BESIDE else None):
                raise refusal(
                    path,
                    f"config.json: {name}={short(value)} contradicts {place}.{key}={short(parameters.get(key))}, and the "
                    "versions of transformers differ in which they read; keep the one that the weights were trained with",
                )
    rope = read.get(None) or read.get(FULL) or old
    kind = rope.get("rope_type", "default")
    scaling = None if kind == "default" else str(kind)
    return Rope(scaling, rope.get("factor"), rope.get("original_max_position_embeddings"))


def by_layer_type(parameters: Mapping[str, Any]) -> dict[str | None, Any]:
    """Return rope_parameters by type of layer; those of all layers alike under None."""
    typed: dict[str | None, Any] = {key: value for key, value in parameters.items() if key in (FULL, SLIDING)}
    # transformers 5.14 adds a rope_theta of null beside them where a model lacks one of the two types.
    return typed or ({None: parameters} if parameters else {})


def rope_at_top_level(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json's content with the rotary parameters as transformers 4 reads them, which TensorRT-LLM 1.2 has.

    These are rope_theta, rope_local_base_freq and rope_scaling at the top level. transformers 5 reads both forms.
    """
    parameters = by_layer_type(config.get("rope_parameters") or {})
    if not parameters:
        return config
    flat = {key: value for key, value in config.items() if key != "rope_parameters"}
    rope = dict(parameters.get(None) or parameters.get(FULL) or parameters.get(SLIDING) or {})
    flat |= {key: rope.pop(key) for key in BESIDE if rope.get(key) is not None}
    flat["rope_scaling"] = None if rope.get("rope_type", rope.get("type", "default")) == "default" else rope
    local = (parameters.get(SLIDING) or {}).get("rope_theta")
    return flat if local in (None, flat.get("rope_theta")) else {**flat, "rope_local_base_freq": local}


def _checked(path: Path, place: str, parameters: object) -> dict[str, Any]:
    """Return rotary parameters with their kind under rope_type."""
    if parameters is None or parameters == {}:
        return {}
    if not isinstance(parameters, dict):
        raise refusal(path, f"config.json: {place} must be an object or null, got {short(repr(parameters), 40)}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise refusal(path, f"config.json: {place}.rope_type={short(kind)} is not supported; use one of {known}")
    for key, value in parameters.items():
        if key not in ROPE_TEXTS and not (value is None or type(value) is bool or is_number(value)):
            raise refusal(path, f"config.json: {place}.{short(key)} must be a number, got {short(value)}")
    missing = [key for key in ROPE_NEEDS.get(kind, ()) if not parameters.get(key)]
    if missing:
        raise refusal(path, f"config.json: {place}.{missing[0]} is missing, which {kind} needs; add it")
    for key in ("rope_theta", "original_max_position_embeddings", "factor"):
        value = parameters.get(key)
        if value is not None and not is_number(value, 1, MOST):
            raise refusal(path, f"config.json: {place}.{key} must be a number of at least 1, at most 1e12, got {short(value)}")
    if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        low = short(parameters["low_freq_factor"])
        raise refusal(path, f"config.json: {place}.low_freq_factor must be below high_freq_factor, got {low}")
    return {key: value for key, value in parameters.items() if key != "type"} | {"rope_type": kind}


def is_number(value: object, lowest: float = 0, highest: float = sys.float_info.max) -> bool:
    """Whether a value of a JSON file is a number that a float holds, from `lowest` to `highest`."""
    return isinstance(value, int | float) and type(value) is not bool and lowest <= value <= highest
