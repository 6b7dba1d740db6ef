"""The rotary embeddings of a config.json, read from all forms that transformers 4.57 and 5 write.

Version 4.57 writes rope_theta and rope_scaling at the top level, and rope_local_base_freq for the sliding layers of Gemma 3.
Version 5 writes rope_parameters, plain or by layer type, and reads both forms.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.checkpoints.families import FAMILIES
from stages.checkpoints.files import refusal, wrong_value
from stages.core.errors import short

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Supported rotary embeddings. Their frequencies do not depend on the current length, so a graph stores them as constants."""

REQUIRED_PARAMETERS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
YARN_BETAS = 1, 32
"""Defaults of YaRN's beta_slow and beta_fast in transformers."""
OPTIONAL_PARAMETERS = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}
FLAGS = ("truncate", "finetuned")
"""Parameters that are true or false. The others are numbers."""
AT_LEAST_1 = ("rope_theta", "original_max_position_embeddings", "factor")
MAX_VALUE = 1e12
ROPE_TEXTS = ("rope_type", "type")

FULL, SLIDING = "full_attention", "sliding_attention"
TOP_LEVEL_KEYS = ("rope_theta", "partial_rotary_factor")
"""Keys that transformers 4 writes at the top level of config.json, not into rope_scaling."""
COMMON_KEYS = (*TOP_LEVEL_KEYS, *ROPE_TEXTS, "original_max_position_embeddings", "finetuned")
"""Keys that any kind of rotary scaling may have."""


@dataclass(frozen=True)
class Rope:
    layers: Mapping[str | None, dict[str, Any]]
    """Layer type -> parameters in config.json; the key is None if all layers share them."""

    @property
    def _main(self) -> dict[str, Any]:
        return self.layers.get(None) or self.layers.get(FULL) or {}

    @property
    def scaling(self) -> str | None:
        """Kind of scaling (`llama3`, `yarn`, ...) in layers with full attention; None for plain rotary embeddings."""
        kind = self._main.get("rope_type", "default")
        return None if kind == "default" else str(kind)

    def positions(self, configured: int) -> int:
        """Return the maximum sequence length in tokens; `configured` is max_position_embeddings.

        For YaRN, Qwen stores the unscaled length there, so the scaling factor is applied. The factors of llama3 and linear
        divide frequencies and do not change the length.
        """
        factor, original = (self._main.get(key) for key in ("factor", "original_max_position_embeddings"))
        return max(configured, int(original * factor)) if self.scaling == "yarn" and original else configured


def read_rope(path: Path, config: Mapping[str, Any]) -> Rope:
    """Read the rotary embeddings of a configuration of a known family.

    Raises UserError if a value has the wrong type, a kind is not supported or lacks a parameter, two keys contradict each
    other, rope_parameters has layer types although the family does not use them, or lacks a layer type of the family.
    """
    new, local = config.get("rope_parameters"), FAMILIES[config["model_type"]].local_base
    if new is not None and not isinstance(new, dict):
        raise wrong_value(path, dict(config), "rope_parameters", "an object or null")
    new, old = new or {}, _check_parameters(path, "rope_scaling", config.get("rope_scaling"))
    places = {kind: "rope_parameters" if kind is None else f"rope_parameters.{kind}" for kind in (None, FULL, SLIDING)}
    typed = {kind: _check_parameters(path, places[kind], parameters) for kind, parameters in by_layer_type(new).items()}
    if typed and None not in typed:
        if local is None:
            raise refusal(
                path,
                f"config.json: rope_parameters has layer types, which transformers does not read for a {config['model_type']}; "
                "write the parameters that the weights were trained with directly into rope_parameters",
            )
        shared = {f"rope_parameters.{key}": value for key, value in new.items() if key not in typed and value not in (None, {})}
        _refuse_contradiction(path, shared, places[FULL], typed.get(FULL) or {"rope_type": "default"})
    if not typed and "rope_scaling" in config:
        old = {"rope_type": "default"} | old
    layers: dict[str | None, dict[str, Any]] = {}
    unstated: list[str | None] = []
    for kind in (FULL, SLIDING) if local else (None,):
        base = local if local and kind == SLIDING else "rope_theta"
        given = kind if kind in typed or kind == SLIDING else None  # keys of all layers apply only to full attention
        top_level = {key: config[key] for key in (base, "partial_rotary_factor") if config.get(key) is not None}
        _refuse_contradiction(path, top_level, places[given], typed.get(given, {}))
        if kind != SLIDING:
            _refuse_contradiction(path, top_level, "rope_scaling", old)
            scaling = {f"rope_scaling.{key}": value for key, value in old.items()}
            _refuse_contradiction(path, scaling, places[given], typed.get(given, {}))
        theta = config.get(base) or new.get(base)
        stated = {} if theta is None else {"rope_theta": theta}
        stated |= {key: value for key, value in top_level.items() if key != base}
        stated |= typed.get(given) or ({} if kind == SLIDING else old)
        if stated:
            layers[kind] = {"rope_type": "default"} | stated if local else stated
        if not stated or (typed and kind not in typed and theta is None):
            unstated.append(kind)
    missing = next((kind for kind in unstated if kind in (config.get("layer_types") or (FULL, SLIDING))), None)
    if local and missing and (typed or layers):
        raise refusal(path, f"config.json: {places[missing]} is missing; add it with its rope_theta")
    return Rope(layers)


def compose_rope(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json with its rotary embeddings in the form of transformers 5. Raises as `read_rope`."""
    layers = read_rope(path, config).layers
    if not layers or (None in layers and "rope_type" not in layers[None]):
        return config  # the class's default scaling, with rope_theta at the top level
    plain = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling", "rope_local_base_freq")}
    return {**plain, "rope_parameters": layers.get(None) or layers}


def _refuse_contradiction(path: Path, stated: Mapping[str, Any], place: str, parameters: Mapping[str, Any]) -> None:
    """Raise UserError if a `stated` parameter (full name -> value) has another value in `parameters`, the object at `place`."""
    for name, value in stated.items():
        key = "rope_theta" if name == "rope_local_base_freq" else name.rpartition(".")[2]
        if parameters and value != parameters.get(key, value if key in TOP_LEVEL_KEYS else None):
            raise refusal(
                path,
                f"config.json: {name}={short(value)} contradicts {place}.{key}={short(parameters.get(key))}, and "
                "versions of transformers read different ones; keep the one that the weights were trained with",
            )


def by_layer_type(parameters: Mapping[str, Any]) -> dict[str | None, Any]:
    """Return layer type -> parameters of rope_parameters; the key is None if all layers share them."""
    typed: dict[str | None, Any] = {key: value for key, value in parameters.items() if key in (FULL, SLIDING) and value}
    # transformers 5.14 adds a rope_theta of null at this level if a model lacks a layer type.
    return typed or ({None: parameters} if parameters else {})


def rope_at_top_level(config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json with its rotary parameters in the form of transformers 4, for TensorRT-LLM 1.2.

    The keys are rope_theta, rope_local_base_freq and rope_scaling at the top level. transformers 5 reads both forms.
    """
    parameters = by_layer_type(config.get("rope_parameters") or {})
    if not parameters:
        return config
    flat = {key: value for key, value in config.items() if key != "rope_parameters"}
    rope = dict(parameters.get(None) or parameters.get(FULL) or parameters.get(SLIDING) or {})
    flat |= {key: rope.pop(key) for key in TOP_LEVEL_KEYS if rope.get(key) is not None}
    flat["rope_scaling"] = None if rope.get("rope_type", rope.get("type", "default")) == "default" else rope
    local = (parameters.get(SLIDING) or {}).get("rope_theta")
    return flat if local in (None, flat.get("rope_theta")) else {**flat, "rope_local_base_freq": local}


def _check_parameters(path: Path, place: str, parameters: object) -> dict[str, Any]:
    """Check the rotary parameters at `place`, and return them with rope_type. Raises UserError."""
    if parameters is None or parameters == {}:
        return {}
    if not isinstance(parameters, dict):
        raise refusal(path, f"config.json: {place} must be an object or null, got {short(repr(parameters), 40)}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("type", kind) != kind:
        other = short(parameters["type"])
        raise refusal(path, f"config.json: {place}.type={other} contradicts rope_type={short(kind)}; keep the right one")
    if kind not in ROPE_TYPES:
        choices = ", ".join(ROPE_TYPES)
        raise refusal(path, f"config.json: {place}.rope_type={short(kind)} is not supported; use one of {choices}")
    read = (*COMMON_KEYS, *REQUIRED_PARAMETERS.get(kind, ()), *OPTIONAL_PARAMETERS.get(kind, ()))
    for key, value in parameters.items():
        may_be_bool = key in FLAGS or key not in (*read, *AT_LEAST_1)
        limits = (1, MAX_VALUE) if key in AT_LEAST_1 else (0,)
        if key not in ROPE_TEXTS and not (value is None or is_number(value, *limits) or (type(value) is bool and may_be_bool)):
            expected = "a number of at least 1, at most 1e12" if key in AT_LEAST_1 else "a number"
            raise refusal(path, f"config.json: {place}.{short(key)} must be {expected}, got {short(repr(value))}")
        plain = value in (None, False) or (key == "factor" and value == 1)
        if not plain and key not in read:
            raise refusal(
                path,
                f"config.json: {place}.{short(key)}={short(value)} is not read with rope_type={kind}; set the rope_type that "
                "the weights were trained with, or remove the key",
            )
    missing = [key for key in REQUIRED_PARAMETERS.get(kind, ()) if not parameters.get(key)]
    if missing:
        raise refusal(path, f"config.json: {place}.{missing[0]} is missing, which {kind} needs; add it")
    original = parameters.get("original_max_position_embeddings")
    if original is not None and original != int(original):
        place = f"{place}.original_max_position_embeddings"
        raise refusal(path, f"config.json: {place} must be a whole number, got {short(repr(original))}")
    low, high = ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    least, most = parameters.get(low) or YARN_BETAS[0], parameters.get(high) or YARN_BETAS[1]
    if least > most or (least == most and kind == "llama3"):  # transformers adds 0.001 to equal betas of YaRN
        raise refusal(path, f"config.json: {place}.{low} must be below {high}, got {short(least)} and {short(most)}")
    return {key: value for key, value in parameters.items() if key != "type" and value is not None} | {"rope_type": kind}


def is_number(value: object, lowest: float = 0, highest: float = sys.float_info.max) -> bool:
    """Return whether a JSON value is a number from `lowest` to `highest`, by default any non-negative float."""
    return isinstance(value, int | float) and type(value) is not bool and lowest <= value <= highest
