"""Compares the rotary embeddings that transformers builds with the parameters in config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.checkpoints.files import refusal
from stages.checkpoints.rope import TOP_LEVEL_KEYS, read_rope
from stages.core.errors import short

DEFAULTED = (*TOP_LEVEL_KEYS, "original_max_position_embeddings")
"""Parameters for which the default of the model class is accepted. Without a `rope_type` in config.json, every default is."""


def check_rotary(path: Path, config: dict[str, Any], model: Any, stored: Mapping[str, Any] | None = None) -> None:
    """Raise UserError if a model's rotary embeddings differ from its configuration or from its weights.

    `stored`: frequencies by tensor name; old checkpoints contain them, and transformers ignores them.
    """
    rebuilt = type(model.model.rotary_emb)(model.config)  # rebuilt on the CPU: frequencies on the meta device have no values
    computed = [buffer for name, buffer in rebuilt.named_buffers() if name.endswith("inv_freq")]
    by_kind = {
        kind: (stated, model.config.rope_parameters if kind is None else model.config.rope_parameters[kind])
        for kind, stated in read_rope(path, config).layers.items()
        if kind is None or kind in model.config.layer_types
    }
    if stored:  # old versions of transformers stored the frequencies before they were scaled
        computed += [_rotary({**applied, "rope_type": "default"}, model.config)[0] for _, applied in by_kind.values()]
    for name, frequencies in (stored or {}).items():  # often rounded to 16 bits
        if not any(
            frequencies.shape == buffer.shape and buffer.allclose(frequencies.float(), rtol=0.01, atol=1e-6)
            for buffer in computed
        ):
            raise refusal(
                path,
                f"the rotary frequencies in {short(name)} of the weights differ from config.json; correct rope_theta and "
                "rope_scaling, or remove the tensor if they are correct",
            )
    for kind, (stated, applied) in by_kind.items():
        prefix = "" if kind is None else f"{kind}_"
        differing = [f"{key}={short(applied.get(key))}" for key, value in stated.items() if applied.get(key) != value]
        keys = DEFAULTED if "rope_type" in stated else applied.keys()
        expected, scale = _rotary({key: applied[key] for key in keys if key in applied} | stated, model.config)
        frequencies = getattr(rebuilt, f"{prefix}inv_freq")
        if differing or frequencies.shape != expected.shape or not frequencies.allclose(expected, rtol=1e-6, atol=0):
            applies = "other rotary " + (f"parameters ({', '.join(differing)})" if differing else "frequencies")
        elif getattr(rebuilt, f"{prefix}attention_scaling") != scale:
            applies = f"another attention_factor (not {scale})"
        else:
            continue
        parameters = ", ".join(f"{key}={short(value)}" for key, value in stated.items())
        raise refusal(
            path,
            f"config.json: transformers applies {applies} to {'all' if kind is None else kind} layers of this "
            f"{model.config.model_type} than the stated {parameters}; correct the rope parameters",
        )


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def _rotary(parameters: dict[str, Any], config: Any) -> tuple[Any, float]:
    """Return the inverse frequencies and the attention factor for RoPE parameters and the sizes of `config`."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if parameters["rope_type"] == "default":
        parameters = parameters | {"rope_type": "linear", "factor": 1.0}
    positions = config.max_position_embeddings
    plain = LlamaConfig(head_dim=head_dim_of(config), max_position_embeddings=positions, rope_parameters=parameters)
    frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](plain)
    return frequencies, scale
