"""Faults of scales: from another place, of another precision, of another time, or missing."""

from functools import partial
from typing import Any

from faults.fault import Fault
from faults.hooks import Array, Step, static, times, write


def drifting(x: Array, step: Step) -> Any:
    """Scale the values by a factor that grows by 0.1 every 100 steps."""
    return x * (1 + step.number // 100 * 0.1)


of = partial(Fault, "scales")

FAULTS = [
    of("key_scale_head_x1_25", "int8", "one head's scale is a stale calibration's",
       write("key_scale", times(1.25), layers=[2], heads=[0]), "conformance"),
    of("values_x1_02_layer", "fp8", "one layer's value scale was rounded in its file", static("value", lambda x: x * 1.02, [3]),
       "conformance"),
    of("fnuz_scales", "fp8", "E4M3FNUZ codes read as E4M3FN: every number doubled (AMD and NVIDIA FP8)",
       static("key", lambda x: x * 2) + static("value", lambda x: x * 2)),
    of("groups_swapped", "int8_groups", "two groups' scales change places in one head",
       write("value_scale", lambda x, _: x[..., ::-1], layers=[2], heads=[0])),
    of("scale_drifts", "int8", "the scale of new values grows while the engine serves", write("value_scale", drifting)),
]  # fmt: skip
