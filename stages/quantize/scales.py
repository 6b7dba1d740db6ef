"""Computes the cache's static scales from the extremes measured in calibration."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from stages.core.errors import UserError
from stages.policies.formats import Format, Rotation
from stages.policies.policy import KVPolicy, KVShape, Side
from stages.policies.scales import KVScales, SideScales
from stages.quantize.recipe import Place

EXTREMES_FILE = "extremes.json"
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32; static scales are applied as float32."""


@dataclass(frozen=True)
class Extremes:
    """Extremes of one layer's keys or values over the calibration texts, one number per head and channel (head-major)."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def amax(self) -> tuple[float, ...]:
        return tuple(max(-low, high) for low, high in zip(self.low, self.high, strict=True))


Measured = Mapping[tuple[Rotation, Place], Extremes]
"""Extremes by rotation of the states before quantization, and by layer and side."""


def write_extremes(file: Path, measured: Measured) -> None:
    rows = [
        {"rotation": rotation, "layer": layer, "side": side, **asdict(extremes)}
        for (rotation, (layer, side)), extremes in measured.items()
    ]
    file.write_text(json.dumps(rows) + "\n", encoding="utf-8")


def read_extremes(file: Path) -> Measured:
    return {
        (row["rotation"], (row["layer"], Side(row["side"]))): Extremes(tuple(row["low"]), tuple(row["high"]))
        for row in json.loads(file.read_text(encoding="utf-8"))
    }


def static_scales(policy: KVPolicy, shape: KVShape, measured: Measured, checkpoint: Path) -> KVScales:
    """Compute the scales of the policy's static sides.

    A scale is 1.0 for an uncalibrated format, amax / `Format.largest` for a symmetric format, and (max - min) / `Spec.levels`
    for an asymmetric format, whose zero point is the minimum.
    """
    layers: list[dict[Side, SideScales]] = []
    for layer in range(shape.layers):
        static: dict[Side, SideScales] = {}
        for name, form in policy.sides(layer).items():
            count = form.static_scales(shape.kv_heads, shape.head_dim)
            if form.scale == "uncalibrated":
                static[name] = SideScales(scale=(1.0,) * count)
            elif form.scale == "calibrated":
                extremes = measured[form.rotation, (layer, name.base)]
                if max(extremes.amax) == 0:
                    raise UserError(
                        f"model.path={checkpoint}: the {name.base}s of layer {layer} are all 0 on the calibration texts, "
                        "so no scale can be computed; check the checkpoint"
                    )
                static[name] = scales_from_extremes(form, count, extremes)
        layers.append(static)
    return KVScales(layers=tuple(layers))


def scales_from_extremes(form: Format, count: int, extremes: Extremes) -> SideScales:
    """Return `count` scales for one layer's keys or values, such that no measured number saturates."""
    if form.symmetric:
        return SideScales(scale=_scales(_reduce(extremes.amax, count, max), form.largest))
    low, high = _reduce(extremes.low, count, min), _reduce(extremes.high, count, max)
    ranges = tuple(top - bottom for bottom, top in zip(low, high, strict=True))
    return SideScales(scale=_scales(ranges, form.code.levels), zero=low)


def _reduce(fine: tuple[float, ...], count: int, extreme: Callable[[tuple[float, ...]], float]) -> tuple[float, ...]:
    """Return the extremes of `count` equal parts of `fine`. `fine` is head-major, so the parts are heads."""
    size = len(fine) // count
    return tuple(extreme(fine[start : start + size]) for start in range(0, len(fine), size))


def _scales(ranges: tuple[float, ...], codes: float) -> tuple[float, ...]:
    """Divide each range by `codes`, the largest number that the codes represent at a scale of 1.

    A range near 0 (for example of a pruned head) gets the smallest scale that is a normal float32.
    """
    return tuple(max(value_range / codes, SMALLEST_SCALE) for value_range in ranges)
