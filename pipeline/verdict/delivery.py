"""What engines of other libraries do by themselves, or do not show: scales on their way from a checkpoint, and servers.

Another library loads scales by itself. It may not find them, take 1.0 in their place, or merge what it has room for once; an
evaluation would then judge something that nobody asked for. A server shows no scales at all, and little of its distributions.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from pipeline.core.engine import Engine
from pipeline.core.errors import GateRefusal
from pipeline.core.kv import Side
from pipeline.core.records import LayerDelivery
from pipeline.verdict.record import Number, Record
from pipeline.verdict.thresholds import ScaleChangeKind

SAME = 2.0**-9
"""Relative difference of scales that are the same: vLLM rounds those of ModelOpt's form to the model's 16 bits."""

RANGE = 1e-6, 1e3
"""Of scales that calibrations give: FP8 holds 448 times as much."""

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
    return [
        ScaleChange(layer=layer, side=side, kind=kind, carried=scales.carried.get(side, ()), used=scales.used[side])
        for layer, scales in enumerate(delivered)
        for side in sorted(static.get(layer, ()))
        if (kind := _kind(scales, side)) is not None
    ]


def audit_scales(engine: Engine, allowed: Collection[ScaleChangeKind]) -> list[ScaleChange] | None:
    """Return the scales that an engine uses otherwise than its checkpoint carries them; None where it loads none by itself.

    Raises:
        GateRefusal: naming those that `gates.allow_scale_changes` does not accept.
    """
    if not engine.can(Engine.delivery):
        return None
    policy = engine.policy
    static = {
        layer: [side for side, form in policy.sides(layer).items() if form.has_static_scales]
        for layer in range(engine.shape.layers)
    }
    changes = scale_changes(engine.delivery(), static)
    refused = [change for change in changes if change.kind not in allowed]
    if refused:
        kinds = ",".join(sorted({change.kind for change in changes}))
        raise GateRefusal(
            f"kv={policy.name}: the engine does not use the scales of its checkpoint: {describe_changes(refused)}; deliver "
            f"them as it reads them, or judge it as it is with gates.allow_scale_changes=[{kinds}]"
        )
    return changes


def scale_findings(layers: Sequence[LayerDelivery]) -> Iterator[str]:
    """Yield what is wrong with scales that every layer should have, one line each: not used as carried, or no calibration's."""
    whole = {
        number: [side for side in (Side.KEY, Side.VALUE) if all(map(math.isfinite, layer.carried.get(side, ())))]
        for number, layer in enumerate(layers)
    }
    for change in scale_changes(layers, whole):
        yield f"{change.kind}: {change}"
    for number, layer in enumerate(layers):
        for side, scales in layer.carried.items():
            wrong = next((scale for scale in scales if not (math.isfinite(scale) and RANGE[0] <= scale <= RANGE[1])), None)
            if wrong is not None:
                yield f"out of range: layer {number} {side}s: {wrong:.4g}, not between {RANGE[0]:g} and {RANGE[1]:g}"
            elif set(scales) == {1.0}:
                yield f"defaulted: layer {number} {side}s: the checkpoint carries 1.0 itself, which no calibration gives"


def describe_changes(changes: Sequence[ScaleChange]) -> str:
    """Say in a line how many scales of which kind differ, with the first of each kind."""
    by_kind: dict[ScaleChangeKind, list[ScaleChange]] = {}
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change)
    return "; ".join(f"{len(some)} {kind} ({some[0]})" for kind, some in by_kind.items())


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


class ServerSeen(Record):
    """A server by its URL, and what was seen of it."""

    url: str
    model: str
    """The name by which it serves the model."""
    release: str
    """Empty where it does not say."""
    says: dict[str, str]
    """What it says of its cache; none of it was checked."""
    tokens: int
    """Scored tokens, each forced in a request of its own."""
    shown_mass: Number
    """Mean probability, by the baseline, of the tokens that both servers showed; of the baseline, of those that it showed."""
    prompt_tokens: int
    """Of all these requests."""
    cached_tokens: int | None
    """Those of them that came from its prefix cache, by its own count; null where it does not count."""

    @staticmethod
    def merged(parts: "Sequence[ServerSeen]") -> "ServerSeen":
        """Return what was seen in several rounds."""
        tokens = sum(part.tokens for part in parts)
        masses = [None if part.shown_mass is None else part.shown_mass * part.tokens for part in parts]
        cached = [part.cached_tokens for part in parts]
        return parts[0].model_copy(
            update={
                "tokens": tokens,
                "shown_mass": None if None in masses else sum(m for m in masses if m is not None) / tokens,
                "prompt_tokens": sum(part.prompt_tokens for part in parts),
                "cached_tokens": None if None in cached else sum(count for count in cached if count is not None),
            }
        )

    @property
    def reuse(self) -> str:
        """Say how much of the prompts came from the cache."""
        if self.cached_tokens is None:
            return "how much of the prompts came from its cache it does not say"
        return f"{self.cached_tokens / self.prompt_tokens:.1%} of the prompts' tokens came from its cache, by its own count"


class Served(Record):
    """Both servers of an evaluation by URL."""

    candidate: ServerSeen
    baseline: ServerSeen
    top_logprobs: int
    canary_url: str | None
    """The server with a corrupted scale; null where none was given."""

    @property
    def seen(self) -> str:
        """Say what was seen of the candidate."""
        mass = "an unknown share" if self.candidate.shown_mass is None else f"{self.candidate.shown_mass:.2%}"
        return (
            f"{self.candidate.tokens:,} tokens, each forced over a reused prefix, of top-{self.top_logprobs} log-probabilities "
            f"with {mass} of the probability, so that the KL is a lower bound; {self.candidate.reuse}; free answers by its own "
            "decoding"
        )

    @property
    def unseen(self) -> tuple[str, ...]:
        """Say what was not."""
        canary = () if self.canary_url is not None else ("whether these gates see its cache (backend.canary_url=null)",)
        return (
            "the decode kernel's distributions",
            "tokens beyond those shown",
            "codes, scales and whether it computes its policy (conformance, stress test)",
            "memory and live tokens",
            "whether it is the engine that it was when it was asked, beyond what it says of itself",
            *canary,
        )
