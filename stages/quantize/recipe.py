"""Recipes for ModelOpt as data: the algorithm, the quantizers' attributes, and the exact names to enable.

Attributes are ModelOpt's own (`num_bits`, `axis`, `block_sizes`, `type`); the adapter writes them in the form that the
installed version reads. Keys and values reach their quantizer after the rotary embedding and before the heads are
repeated, as BHSD = (batch, num_kv_heads, sequence, head_dim).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stages.checkpoints.families import LINEARS
from stages.checkpoints.intake.shapes import AWQ_BLOCK
from stages.policies.formats import WeightsFormat
from stages.policies.policy import Side

Attributes = dict[str, Any]
ForwardLoop = Callable[[Any], None]
"""Function that runs every calibration text through a model."""

# From 0.47 on "*weight_quantizer" would also quantize the embedding, and pack it if it is not tied.
LINEAR_WEIGHTS = "*_proj.weight_quantizer"
LINEAR_INPUTS = "*_proj.input_quantizer"

SHARED_INPUTS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
"""Linear layers that read the same input. Engines fuse them. A fused layer has one input scale, one smoothing factor per
input channel, and with FP8 one weight scale."""

Place = tuple[int, Side]
"""(layer, side): a layer's keys or values, which are the input of one quantizer."""
KV_QUANTIZER: dict[Side, str] = {Side.KEY: "k_bmm_quantizer", Side.VALUE: "v_bmm_quantizer"}

PER_CHANNEL = (1, 3)
"""ModelOpt's `axis` of a scale per head and channel: the dimensions of BHSD along which scales differ."""

_FP8: dict[str, Any] = {"num_bits": (4, 3), "axis": None}
_WEIGHTS: dict[WeightsFormat, list[tuple[str, Attributes]]] = {
    "none": [],
    "fp8": [(LINEAR_WEIGHTS, _FP8), (LINEAR_INPUTS, _FP8)],
    "int8_sq": [(LINEAR_WEIGHTS, {"num_bits": 8, "axis": 0}), (LINEAR_INPUTS, {"num_bits": 8, "axis": None})],
    "int4_awq": [(LINEAR_WEIGHTS, {"num_bits": 4, "block_sizes": {-1: AWQ_BLOCK, "type": "static"}})],
}
_ALGORITHM: dict[WeightsFormat, Any] = {
    "none": "max",
    "fp8": "max",
    "int8_sq": "smoothquant",
    "int4_awq": {"method": "awq_lite", "alpha_step": 0.1},
}
QUANT_ALGO: dict[WeightsFormat, str | None] = {
    "none": None,
    "fp8": "FP8",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
}
"""The quant_algo that both exports declare for weights."""


@dataclass(frozen=True)
class QuantizationRecipe:
    algorithm: Any
    entries: tuple[tuple[str, Attributes], ...]
    """(wildcard of quantizer names, attributes) for the quantizers to enable; all others are disabled."""
    expected: Mapping[str, Attributes]
    """Name -> attributes of exactly the quantizers that must be enabled afterwards."""


NOTHING = QuantizationRecipe("max", (), {})


def weight_recipe(weights: WeightsFormat, layers: int) -> QuantizationRecipe:
    """Return the recipe for the linear layers of `layers` decoder layers."""
    expected = {
        f"model.layers.{layer}.{linear}.{name.removeprefix('*_proj.')}": attributes
        for layer in range(layers)
        for linear in LINEARS
        for name, attributes in _WEIGHTS[weights]
    }
    return QuantizationRecipe(_ALGORITHM[weights], tuple(_WEIGHTS[weights]), expected)


def quantizer_name(place: Place) -> str:
    """Return the module name of a quantizer in ModelOpt's model."""
    layer, side = place
    return f"model.layers.{layer}.self_attn.{KV_QUANTIZER[side]}"


def check_enabled(expected: Mapping[str, Attributes], enabled: Mapping[str, Attributes]) -> None:
    """Raise RuntimeError unless exactly `expected` is enabled, with its attributes: ModelOpt ignores unknown names."""
    for name in sorted(enabled.keys() ^ expected.keys()):
        problem = "missing" if name in expected else "unexpected"
        raise RuntimeError(f"ModelOpt enabled {len(enabled)} quantizers instead of {len(expected)}: {name} is {problem}")
    for name, attributes in expected.items():
        for key in attributes.keys() & enabled[name].keys():
            if attributes[key] != enabled[name][key]:
                raise RuntimeError(f"{name}: ModelOpt set {key}={enabled[name][key]} instead of {attributes[key]}")
