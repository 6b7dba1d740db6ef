"""Calibrated static scales of a cache: exactly the scales that its policy needs."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat

from stages.core.errors import UserError
from stages.core.strict import StrictModel
from stages.policies.policy import POLICY_FILE, KVPolicy, KVShape, Side

SCALES_FILE = "kv_scales.json"
"""File with the KVScales, in the folder of their policy."""

Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SideScales(StrictModel):
    """Static scales of one side of one layer, and the zero points of an asymmetric format.

    Each has 1, H or H * D numbers (head-major). x ~ code * scale + zero; asymmetric codes start at 0.
    """

    scale: Annotated[tuple[Scale, ...], Field(min_length=1)]
    zero: tuple[FiniteFloat, ...] | None = None


class KVScales(StrictModel):
    """Static scales by layer; a dynamic or exact side is absent."""

    layers: tuple[dict[Annotated[Side, Field(strict=False)], SideScales], ...]

    def check(self, policy: KVPolicy, shape: KVShape, source: object) -> None:
        """Raise UserError, which names `source`, unless the scales match the static formats of the policy exactly."""
        if len(self.layers) != shape.layers:
            raise UserError(f"{source}: holds scales of {len(self.layers)} layers, the model has {shape.layers}")
        for layer, scales in enumerate(self.layers):
            static = {side: form for side, form in policy.sides(layer).items() if form.has_static_scales}
            for side in static.keys() ^ scales.keys():
                problem = "has no static scale" if side in scales else "has static scales, which are missing"
                raise UserError(f"{source}: layer {layer}: {side} of kv policy {policy.name} {problem}")
            for side, form in static.items():
                count = form.static_scales(shape.kv_heads, shape.head_dim)
                zeros = None if form.symmetric else count
                stored = scales[side].zero
                if (len(scales[side].scale), None if stored is None else len(stored)) != (count, zeros):
                    raise UserError(
                        f"{source}: layer {layer}: {side} must hold {count} scales and {zeros or 'no'} zeros for "
                        f"{form.dtype} {form.granularity}, got {len(scales[side].scale)} and {len(stored or ())}"
                    )


def write_policy(directory: Path, policy: KVPolicy, scales: KVScales) -> None:
    for name, record in ((POLICY_FILE, policy), (SCALES_FILE, scales)):
        (directory / name).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
