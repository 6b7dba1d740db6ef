"""Scales on their way from a checkpoint into a loaded engine: which of them arrived as something else.

Another library loads them by itself. It may not find them, take 1.0 in their place, or merge what it has room for once; an
evaluation would then judge something that nobody asked for.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from pipeline.core.kv import Side
from pipeline.core.records import LayerDelivery
from pipeline.verdict.record import Record
from pipeline.verdict.thresholds import ScaleChangeKind

SAME = 1e-6
"""Relative difference of float32 scales that are the same."""

WORDS: dict[ScaleChangeKind, str] = {
    "missing": "the checkpoint has none, and {used} is used",
    "defaulted": "{carried} became the default, 1.0",
    "merged": "{carried} was merged with others to the largest, {used}",
    "swapped": "{carried} is used for the other side, {used} here",
    "changed": "{carried} became {used}",
}


class ScaleChange(Record):
    """A scale that an engine does not use as the checkpoint carries it."""

    layer: int
    side: Side
    kind: ScaleChangeKind
    carried: tuple[float, ...]
    used: tuple[float, ...]

    def __str__(self) -> str:
        words = WORDS[self.kind].format(carried=_numbers(self.carried), used=_numbers(self.used))
        return f"layer {self.layer} {self.side}s: {words}"


def scale_changes(delivered: Sequence[LayerDelivery], static: Mapping[int, Collection[Side]]) -> list[ScaleChange]:
    """Return what differs, by layer and side.

    Args:
        delivered: The scales of every layer.
        static: The sides of each layer that have static scales by the policy.
    """
    changes = []
    for layer, scales in enumerate(delivered):
        for side in sorted(static.get(layer, ())):
            kind = _kind(scales, side)
            if kind is not None:
                changes.append(
                    ScaleChange(layer=layer, side=side, kind=kind, carried=scales.carried.get(side, ()), used=scales.used[side])
                )
    return changes


def describe_changes(changes: Sequence[ScaleChange]) -> str:
    """Say in a line how many scales of which kind differ, with the first of each kind."""
    counts = Counter(change.kind for change in changes)
    parts = []
    for kind, count in counts.items():
        first = next(change for change in changes if change.kind == kind)
        parts.append(f"{count} {kind} ({first})")
    return "; ".join(parts)


def _kind(scales: LayerDelivery, side: Side) -> ScaleChangeKind | None:
    other = Side.VALUE if side is Side.KEY else Side.KEY
    carried, used = scales.carried.get(side), scales.used[side]
    if carried is None:
        return "missing"
    if _same(carried, used):
        return None
    given = scales.carried.get(other, ())
    if _same(used, given) and _same(scales.used[other], carried):
        return "swapped"
    if _same(used, (max(carried),)) or _same(used, (max(*carried, *given, 0.0),)):
        return "merged"
    return "defaulted" if set(used) == {1.0} else "changed"


def _same(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= SAME * abs(a) for a, b in zip(one, other, strict=True))


def _numbers(scales: Sequence[float]) -> str:
    shown = ", ".join(f"{scale:.4g}" for scale in scales[:4])
    return f"[{shown}{', ...' if len(scales) > 4 else ''}]" if len(scales) != 1 else shown
