"""Comparison of the scales that another library's engine loads from a checkpoint.

The library may miss scales, use 1.0 instead, or merge several scales into one. An evaluation would then judge a cache that the
policy does not describe.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stages.core.records import Record
from stages.policies.policy import Side

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
