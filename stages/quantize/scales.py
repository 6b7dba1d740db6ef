"""Static scales of the cache from what calibration measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import UserError
from pipeline.core.formats import Format, Rotation
from pipeline.core.kv import KVPolicy, KVScales, KVShape, Side, SideScales
from stages.quantize.recipe import Place

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32, which static scales are used as."""


@dataclass(frozen=True)
class Extremes:
    """What one layer's keys or values reach over the calibration texts: one number, one a KV head, or one a head and
    channel (head-major)."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    amax: tuple[float, ...]
    """Largest magnitude, ModelOpt's measurement."""


Measured = Mapping[Rotation, Mapping[Place, Extremes]]


def static_scales(policy: KVPolicy, shape: KVShape, measured: Measured, checkpoint: Path) -> KVScales:
    """Scales of the policy's static sides: 1.0 where uncalibrated, amax / limit where symmetric, and (max - min) / levels
    with the minimum as zero where asymmetric.

    They are measured with the weights of `checkpoint/`, which the engine is built from.
    Raises UserError when a layer's keys or values are all zero: then the checkpoint itself computes nonsense.
    """
    layers: list[dict[Side, SideScales]] = []
    for layer in range(shape.layers):
        static: dict[Side, SideScales] = {}
        for name, form in policy.sides(layer).items():
            count = form.static_scales(shape.kv_heads, shape.head_dim)
            if form.scale == "uncalibrated":
                static[name] = SideScales(scale=(1.0,) * count)
            elif form.scale == "calibrated":
                extremes = measured[form.rotation][layer, name.base]
                if max(extremes.amax) == 0:
                    raise UserError(
                        f"model.path={checkpoint}: the {name.base}s of layer {layer} are all 0 on the calibration texts, "
                        "which makes no scale; check the checkpoint"
                    )
                static[name] = _calibrated(form, count, extremes)
        layers.append(static)
    return KVScales(layers=tuple(layers))


def _calibrated(form: Format, count: int, extremes: Extremes) -> SideScales:
    if form.symmetric:
        return SideScales(scale=_scales(_reduce(extremes.amax, count, max), form.code.limit))
    low, high = _reduce(extremes.low, count, min), _reduce(extremes.high, count, max)
    ranges = tuple(top - bottom for bottom, top in zip(low, high, strict=True))
    return SideScales(scale=_scales(ranges, form.code.levels), zero=low)


def _reduce(fine: tuple[float, ...], count: int, extreme: Callable[[tuple[float, ...]], float]) -> tuple[float, ...]:
    """`count` extremes of equal parts; parts of a head-major sequence are heads."""
    size = len(fine) // count
    return tuple(extreme(fine[start : start + size]) for start in range(0, len(fine), size))


def _scales(ranges: tuple[float, ...], codes: float) -> tuple[float, ...]:
    """A head or channel that hardly changes (a pruned one, say) gets a scale that still divides as a float32."""
    return tuple(max(reach / codes, SMALLEST_SCALE) for reach in ranges)
