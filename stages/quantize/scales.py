"""Static scales of the cache from what calibration measured."""

import math
from pathlib import Path

from pipeline.errors import UserError
from pipeline.kv import CODE_MAX, KVPolicy, KVScales
from stages.quantize.recipe import Side, sides


def static_scales(policy: KVPolicy, layers: int, amax: dict[Side, list[float]], checkpoint: Path) -> KVScales:
    """Scales of the policy's static sides: amax / CODE_MAX where calibrated, 1.0 where not.

    amax: largest magnitude of each layer's keys or values over the calibration texts, for each calibrated side. They
    are measured with the weights of `checkpoint/`, which the engine is built from.
    Raises UserError when it is zero, infinite or NaN: then the checkpoint itself computes nonsense.
    """
    result: dict[Side, tuple[float, ...] | None] = {}
    for side, form in sides(policy):
        if form.scale == "uncalibrated":
            result[side] = (1.0,) * layers
        elif form.scale == "calibrated":
            for layer, measured in enumerate(amax[side]):
                if not (math.isfinite(measured) and measured > 0):
                    raise UserError(
                        f"model.path={checkpoint}: the {side}s of layer {layer} reach {measured} on the calibration "
                        "texts; a scale needs a finite maximum above 0: check the checkpoint"
                    )
            result[side] = tuple(measured / CODE_MAX[form.dtype] for measured in amax[side])
        else:
            result[side] = None
    return KVScales(key=result["key"], value=result["value"])
