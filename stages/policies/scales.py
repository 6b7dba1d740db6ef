"""Calibrated static scales of a cache: exactly the scales that its policy needs, and how another library changes them.

A library may miss the scales of a checkpoint, use 1.0 instead, or merge several scales into one. An evaluation would then judge
a cache that the policy does not describe.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from stages.core.errors import UserError
from stages.core.records import Record
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


Scales = dict[Side, tuple[float, ...]]
"""Static scales of one layer; a side without scales is absent."""
ScaleChangeKind = Literal["missing", "defaulted", "merged", "swapped", "changed"]

MAX_DIFFERENCE = 2.0**-9
"""Relative difference up to which scales are equal: vLLM rounds scales in ModelOpt's form to the model's 16-bit type."""

MESSAGES: dict[ScaleChangeKind, str] = {
    "missing": "the checkpoint lacks it, and {used} is used",
    "defaulted": "{carried} became the default, 1.0",
    "merged": "{carried} was merged with others to the largest, {used}",
    "swapped": "{carried} is used for the other side, {used} here",
    "changed": "{carried} became {used}",
}


@dataclass(frozen=True)
class LayerDelivery:
    """Static scales of one layer, in the checkpoint (`carried`) and in the loaded engine (`used`)."""

    carried: Scales
    used: Scales


class ScaleChange(Record):
    """A scale whose value in the engine differs from its value in the checkpoint."""

    layer: int
    side: Side
    kind: ScaleChangeKind
    carried: tuple[float, ...]
    used: tuple[float, ...]

    def __str__(self) -> str:
        words = MESSAGES[self.kind].format(carried=_numbers(self.carried), used=_numbers(self.used))
        return f"layer {self.layer} {self.side}s: {words}"


def scale_changes(delivered: Sequence[LayerDelivery], static: Mapping[int, Collection[Side]]) -> list[ScaleChange]:
    """Return the changed scales, by layer and side. `static`: layer -> sides that have static scales under the policy."""
    return [
        ScaleChange(layer=layer, side=side, kind=kind, carried=scales.carried.get(side, ()), used=scales.used[side])
        for layer, scales in enumerate(delivered)
        for side in sorted(static.get(layer, ()))
        if (kind := _kind(scales, side)) is not None
    ]


def describe_changes(changes: Sequence[ScaleChange]) -> str:
    """Return a line with the number of changes by kind, and the first change of every kind."""
    by_kind: dict[ScaleChangeKind, list[ScaleChange]] = {}
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change)
    return "; ".join(f"{len(texts)} {kind} ({texts[0]})" for kind, texts in by_kind.items())


def _kind(scales: LayerDelivery, side: Side) -> ScaleChangeKind | None:
    other = Side.VALUE if side is Side.KEY else Side.KEY
    carried, used = scales.carried.get(side), scales.used[side]
    if carried is None:
        return "missing"
    if _same(carried, used):
        return None
    other_scales = scales.carried.get(other, ())
    if _same(used, other_scales) and _same(scales.used[other], carried):
        return "swapped"
    if _same(used, (max(carried),)) or _same(used, (max(*carried, *other_scales, 0.0),)):
        return "merged"
    return "defaulted" if set(used) == {1.0} else "changed"


def _same(scales: Sequence[float], other: Sequence[float]) -> bool:
    return len(scales) == len(other) and all(abs(a - b) <= MAX_DIFFERENCE * abs(a) for a, b in zip(scales, other, strict=True))


def _numbers(scales: Sequence[float]) -> str:
    numbers = ", ".join(f"{scale:.4g}" for scale in scales[:4])
    return f"[{numbers}{', ...' if len(scales) > 4 else ''}]" if len(scales) != 1 else numbers
