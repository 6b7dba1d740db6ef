"""Recipes for ModelOpt, as data: the algorithm, the quantizers' attributes and the exact names to be enabled.

Attributes are ModelOpt's own (`num_bits`, `axis`, `block_sizes`, `type`); the adapter writes them in the form that the
installed version reads. Keys and values reach their quantizer after the rotary embedding and before the heads are
repeated, as BHSD = (batch, num_kv_heads, sequence, head_dim).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.families import LINEARS
from pipeline.core.formats import Format, Granularity, Rotation, WeightsFormat
from pipeline.core.kv import KVPolicy, KVShape, Side
from pipeline.core.scales import KVScales, SideScales

Attributes = dict[str, Any]
"""Settings of one quantizer."""

BACKEND = "kvgate"
"""Quantization function that we register with ModelOpt for the formats that its own arithmetic cannot express."""

# Not "*weight_quantizer": from 0.47 on that also quantizes the embedding, and packs it when it is not tied.
LINEAR_WEIGHTS = "*_proj.weight_quantizer"
LINEAR_INPUTS = "*_proj.input_quantizer"

SHARED_INPUTS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
"""Linear layers that read the same input. Engines fuse them, and a fused layer has one input scale, one smoothing factor
per input channel, and with FP8 one weight scale."""

AWQ_BLOCK = 128
"""Input channels that share an INT4 weight scale."""

SIDES = (Side.KEY, Side.VALUE)
Place = tuple[int, Side]
"""(layer, side): the keys or the values of a layer, which are the input of one quantizer."""
KV_QUANTIZER: dict[Side, str] = {Side.KEY: "k_bmm_quantizer", Side.VALUE: "v_bmm_quantizer"}

AXES: dict[Granularity, tuple[int, ...] | None] = {
    "per_tensor": None,
    "per_head": (1,),
    "per_channel": (1, 3),
    "per_token": (0, 1, 2),
}
"""ModelOpt's `axis` of each granularity: the dimensions of BHSD that do not share a scale."""
STATIC: tuple[Granularity, ...] = ("per_tensor", "per_head", "per_channel")
"""Granularities of static scales from coarse to fine. The maximum of a coarse one is the maximum of its parts."""

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


@dataclass(frozen=True)
class Recipe:
    """One quantization job for ModelOpt."""

    algorithm: Any
    entries: tuple[tuple[str, Attributes], ...]
    """(wildcard of quantizer names, attributes) of the quantizers to enable; all others are disabled."""
    expected: Mapping[str, Attributes]
    """Names and attributes of all quantizers that must be enabled afterwards, no more and no fewer."""


@dataclass(frozen=True)
class CacheQuantizer:
    """Settings of one quantizer of keys or values."""

    attributes: Attributes
    amax: tuple[float, ...] | None
    """Largest magnitudes that have a code; None where they are dynamic, or stand in the backend's arguments."""
    amax_shape: tuple[int, ...]
    """Shape of `amax`, broadcastable to BHSD; () for one number."""
    rotated: bool
    """Whether its input has to be rotated and its output rotated back. The backend rotates by itself."""


NOTHING = Recipe("max", (), {})
"""Disables every quantizer."""


def weight_recipe(weights: WeightsFormat, layers: int) -> Recipe:
    """Return the recipe for the linear layers of `layers` decoder layers."""
    expected = {
        f"model.layers.{layer}.{linear}.{name.removeprefix('*_proj.')}": attributes
        for layer in range(layers)
        for linear in LINEARS
        for name, attributes in _WEIGHTS[weights]
    }
    return Recipe(_ALGORITHM[weights], tuple(_WEIGHTS[weights]), expected)


def quantizer_name(place: Place) -> str:
    """Return the name of the quantizer in ModelOpt's model."""
    layer, side = place
    return f"model.layers.{layer}.self_attn.{KV_QUANTIZER[side]}"


def measurements(policy: KVPolicy, layers: int) -> dict[Rotation, dict[Place, Granularity]]:
    """List what calibration has to measure for the policy's calibrated sides.

    The copy of a window is of the same tensor as the base copy, so one maximum serves both, unless one of them is rotated.

    Returns:
        Rotation -> place -> the finest granularity that its copies need.
    """
    by_rotation: dict[Rotation, dict[Place, Granularity]] = {}
    for layer in range(layers):
        for name, form in policy.sides(layer).items():
            if form.scale == "calibrated":
                places = by_rotation.setdefault(form.rotation, {})
                place = layer, name.base
                needed = form.static_granularity or form.granularity
                places[place] = max(places.get(place, "per_tensor"), needed, key=STATIC.index)
    return by_rotation


def measuring_recipe(places: Mapping[Place, Granularity]) -> Recipe:
    """Return the recipe that enables the quantizers of `places` only, by exact name.

    Its `num_bits` is arbitrary, because a maximum does not depend on it.
    """
    attributes = {quantizer_name(place): {"num_bits": 8, "axis": AXES[granularity]} for place, granularity in places.items()}
    return Recipe("max", tuple(attributes.items()), attributes)


def cache_quantizers(policy: KVPolicy, shape: KVShape, scales: KVScales) -> dict[str, CacheQuantizer]:
    """Return the quantizers of every layer's keys and values by name; the second copies of a window have none."""
    return {
        quantizer_name((layer, side)): cache_quantizer(form, static.get(side), shape)
        for layer, static in enumerate(scales.layers)
        for side, form in policy.sides(layer).items()
        if side in SIDES and not form.exact
    }


def cache_quantizer(form: Format, static: SideScales | None, shape: KVShape) -> CacheQuantizer:
    """Return the quantizer of one side; `static` holds its scales, None for a dynamic format."""
    if not native(form):
        # "dynamic" keeps ModelOpt from collecting a maximum: the backend has the scales, or computes them itself.
        arguments = {"format": form.model_dump(), "static": None if static is None else static.model_dump()}
        settings = {"num_bits": 8, "axis": None, "type": "dynamic", "backend": BACKEND, "backend_extra_args": arguments}
        return CacheQuantizer(settings, None, (), rotated=False)
    axis = AXES[form.granularity]
    attributes: Attributes = {"num_bits": form.code.modelopt_bits, "axis": axis}
    if form.code.kind == "integer":
        # Without narrow_range a value beyond the calibrated maximum becomes -8 or -128, outside the symmetric codes.
        attributes["narrow_range"] = True
    rotated = form.rotation != "none"
    if static is None:
        return CacheQuantizer({**attributes, "type": "dynamic"}, None, (), rotated)
    shape_BHSD = (1, shape.kv_heads, 1, shape.head_dim)
    amax_shape = () if axis is None else tuple(size if dim in axis else 1 for dim, size in enumerate(shape_BHSD))
    return CacheQuantizer(attributes, tuple(scale * form.code.limit for scale in static.scale), amax_shape, rotated)


def native(form: Format) -> bool:
    """Return whether ModelOpt's own arithmetic expresses a quantized format.

    It has no asymmetric formats: its `bias` is no zero point, the codes stay symmetric.
    """
    return form.code.modelopt_bits is not None and form.symmetric and form.granularity in AXES


def expressed_by(side: Side, form: Format) -> str:
    """Name who rounds a side of this format in ModelOpt's model, in the words of quantizers.json.

    The second copies of a window have no quantizer there: a tensor has one quantizer, and it stands for the base copy.
    """
    if side.in_window:
        return "sidecar only"
    if form.exact:
        return "not quantized"
    return "modelopt" if native(form) else "modelopt with kvgate's arithmetic"


def check_enabled(expected: Mapping[str, Attributes], enabled: Mapping[str, Attributes]) -> None:
    """Check that exactly the expected quantizers are enabled; ModelOpt ignores a name that matches nothing."""
    if enabled.keys() != expected.keys():
        missing, unexpected = sorted(expected.keys() - enabled.keys()), sorted(enabled.keys() - expected.keys())
        raise RuntimeError(
            f"ModelOpt enabled {len(enabled)} quantizers instead of {len(expected)}: "
            f"missing {_abbreviated(missing)}; unexpected {_abbreviated(unexpected)}"
        )
    for name, attributes in expected.items():
        for key in attributes.keys() & enabled[name].keys():
            if attributes[key] != enabled[name][key]:
                raise RuntimeError(f"{name}: ModelOpt set {key}={enabled[name][key]}, asked for {attributes[key]}")


def _abbreviated(names: list[str], most: int = 4) -> str:
    listed = ", ".join(names[:most]) or "none"
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
