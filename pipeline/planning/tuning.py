"""`stage=tune`: its configuration, policies whose formats differ by layer and side, and the record of what was found.

A place is one layer's keys or values. Each place gets its format from one of the uniform policies that `tune.policies` names.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.errors import UserError
from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy, KVShape, LayerOverride, Side
from pipeline.core.scales import KVScales, SideScales
from pipeline.core.strict import StrictModel
from pipeline.core.workloads import Workload
from pipeline.verdict.record import Number, Record, or_infinite

TUNE_FILE = "tune.json"
"""The record, a `TuneReport`, in the stage's artifact and in the folder of what was found."""

SIDES = (Side.KEY, Side.VALUE)

Place = tuple[int, Side]


class TuneConfig(StrictModel):
    """What the search chooses from, what it may cost, and the texts it is measured on."""

    policies: Annotated[list[str], Field(min_length=2, max_length=16)]
    """Names of uniform policies of conf/kv: each place gets the format of one of them."""
    max_kl: Annotated[float, Field(gt=0)]
    """Largest mean KL from the FP16 cache, in nats per token."""
    workloads: Annotated[list[Workload], Field(min_length=1)]
    """What the texts are, in equal parts, unless `calibration.jsonl` names a file."""
    texts: Annotated[int, Field(ge=4, le=10_000)]
    """How many: half are searched on, a quarter checks what is proposed, a quarter is held out."""
    max_length: Annotated[int, Field(ge=64, le=131_072)]
    """Longer texts are cut, in tokens."""

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        if len(set(self.policies)) < len(self.policies):
            raise ValueError(f"policies={self.policies}: name each policy once")
        return self


def check_uniform(policy: KVPolicy) -> None:
    """Raise UserError for a policy that is more than one format for keys and one for values."""
    if policy.exact_tokens or policy.window is not None or policy.eviction is not None or policy.overrides:
        raise UserError(
            f"tune.policies={policy.name}: keeps some tokens or layers in other formats, or not at all; name policies that "
            "have one format for keys and one for values"
        )


def mixed_policy(name: str, formats: Mapping[Place, Format], layers: int) -> KVPolicy:
    """Return the policy that gives every place its format: the most frequent one of a side, and overrides for the others."""
    base: dict[Side, Format] = {}
    overrides: list[LayerOverride] = []
    for side in SIDES:
        chosen = [formats[layer, side] for layer in range(layers)]
        dumped = [form.model_dump_json() for form in chosen]
        common = Counter(dumped).most_common(1)[0][0]
        base[side] = chosen[dumped.index(common)]
        for other in dict.fromkeys(form for form in dumped if form != common):
            members = tuple(layer for layer, form in enumerate(dumped) if form == other)
            overrides.append(LayerOverride(layers=members, **{side.value: chosen[members[0]]}))
    return KVPolicy(name=name, key=base[Side.KEY], value=base[Side.VALUE], overrides=tuple(overrides))


def mixed_scales(policy: KVPolicy, shape: KVShape, known: Sequence[tuple[KVPolicy, KVScales]]) -> KVScales:
    """Return the static scales of a policy, each place's from a uniform policy that has the same format there.

    Args:
        policy: Formats of every place.
        shape: The model's shape.
        known: Uniform policies with their scales.
    """

    def of(layer: int, side: Side, form: Format) -> SideScales:
        return next(scales.layers[layer][side] for uniform, scales in known if uniform.sides(layer)[side] == form)

    return KVScales(
        layers=tuple(
            {side: of(layer, side, form) for side, form in policy.sides(layer).items() if form.has_static_scales}
            for layer in range(shape.layers)
        )
    )


class Sensitivity(Record):
    """What one layer's keys or values cost alone in each format, everything else at 16 bits."""

    layer: int
    side: Side
    kl: dict[str, Number]
    """Mean KL in nats per token, of the texts searched on, by the uniform policy that the format is of."""


class MeasuredPolicy(Record):
    """A policy, measured with all its formats at once."""

    policy: KVPolicy
    origin: Literal["uniform", "tuned"]
    bytes_per_token: int
    kl_sum: Number
    """Sum of what its layers and sides cost alone, on the texts searched on."""
    kl_check: Number
    """Mean KL of all of it on the texts that check proposals."""
    kl_held_out: Number
    """Mean KL on the texts that were held out."""
    kl_held_out_upper: Number
    """Its upper one-sided 95 % bound, by document."""
    beats: list[str] = Field(default_factory=list)
    """Uniform policies that take more bytes and have no less KL on the texts held out."""
    on_front: bool = False
    """Whether no other one has fewer bytes and less KL on the texts held out."""


class TuneReport(Record):
    """What `stage=tune` found."""

    schema_version: Literal[1] = 1
    policies: list[str]
    max_kl: float
    tokens: dict[str, int]
    """Scored tokens of each part of the texts."""
    sensitivities: list[Sensitivity]
    measured: list[MeasuredPolicy]
    chosen: str | None
    """The policy of fewest bytes within `max_kl` where it was measured; None when none has fewer bytes than 16 bits."""


def _kl(one: MeasuredPolicy) -> float:
    """The KL on the texts held out; infinite where it is not finite."""
    return or_infinite(one.kl_held_out)


def beaten(measured: MeasuredPolicy, others: Sequence[MeasuredPolicy]) -> list[str]:
    """Return the uniform policies that take more bytes than `measured` and have no less KL on the texts held out."""
    kl, size = _kl(measured), measured.bytes_per_token
    worse = (other for other in others if other.bytes_per_token > size and math.isfinite(kl) and kl <= _kl(other))
    return [other.policy.name for other in worse if other.origin == "uniform"]


def is_on_front(measured: MeasuredPolicy, others: Sequence[MeasuredPolicy]) -> bool:
    """Return whether no other policy has fewer bytes with no more KL, or as many with less."""
    size, kl = cost = measured.bytes_per_token, _kl(measured)
    costs = ((other.bytes_per_token, _kl(other)) for other in others)
    return math.isfinite(kl) and not any(other[0] <= size and other[1] <= kl and other != cost for other in costs)


def choose(measured: Sequence[MeasuredPolicy], max_kl: float, exact_bytes: int) -> MeasuredPolicy | None:
    """Return the policy of fewest bytes, fewer than `exact_bytes`, whose mean KL is within `max_kl` where it was measured."""
    fewer = (one for one in measured if one.kl_check is not None and one.bytes_per_token < exact_bytes)
    within = [one for one in fewer if max(one.kl_check or 0.0, _kl(one)) <= max_kl]
    return min(within, key=lambda one: (one.bytes_per_token, _kl(one)), default=None)
