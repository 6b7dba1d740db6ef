"""Faults of scales: from another place, or of another time."""

from functools import partial
from typing import Any

from faults.fault import Fault
from faults.hooks import Array, Plant, Step, times, write


def drifting(x: Array, step: Step) -> Any:
    """Scale the values by a factor that grows by 0.1 every 100 steps."""
    return x * (1 + step.number // 100 * 0.1)


def rounded_in_its_file(engine: Any) -> None:
    """Change the static value scales of one layer in place. The engine still reports the sound scales."""
    engine._constants["value_scale.3"] *= 1.02


of = partial(Fault, "scales")

FAULTS = [
    of("key_scale_head_x1_25", "one head's scale is a stale calibration's",
       write("key_scale", times(1.25), layers=[2], heads=[0])),
    of("values_x1_02_layer", "one layer's value scale was rounded in its file", Plant(rounded_in_its_file)),
    of("groups_swapped", "two groups' scales change places in one head",
       write("value_scale", lambda x, _: x[..., ::-1], layers=[2], heads=[0])),
    of("scale_drifts", "the scale of new values grows while the engine serves", write("value_scale", drifting)),
]  # fmt: skip
