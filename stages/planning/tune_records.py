"""`stage=tune`: its configuration, policies whose formats differ by layer and side, and the record of the search.

A place is the keys or the values of one layer. Each place gets its format from a uniform policy in `tune.policies`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stages.core.errors import UserError
from stages.core.records import Number, Record, or_infinite
from stages.core.strict import StrictModel
from stages.policies.formats import Format
from stages.policies.policy import SIDES, KVPolicy, KVShape, LayerOverride, Side
from stages.policies.scales import KVScales, SideScales
from stages.workloads.config import Workload

TUNE_FILE = "tune.json"
"""File of the record (`TuneReport`), in the stage's artifact and in the folder of tuned policies."""

MAX_LENGTH = 512
"""Maximum tokens per text. Longer texts are cut."""

Place = tuple[int, Side]


class TuneConfig(StrictModel):
    """Formats that the search chooses from, the maximum KL, and the texts to measure the KL on."""

    policies: Annotated[list[str], Field(min_length=2, max_length=16)]
    """Names of uniform policies of conf/kv. Each place gets the format of a policy in this list."""
    max_kl: Annotated[float, Field(gt=0)]
    """Largest mean KL from the FP16 cache, in nats per token."""
    workloads: Annotated[list[Workload], Field(min_length=1)]
    """Workloads that provide the texts, in equal parts, unless `calibration.jsonl` names a file."""
    texts: Annotated[int, Field(ge=4, le=10_000)]
    """Number of texts: half to measure each place alone, half to measure whole policies."""

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        if len(set(self.policies)) < len(self.policies):
            raise ValueError(f"policies={self.policies}: name each policy once")
        return self


def check_uniform(policy: KVPolicy) -> None:
    """Raise UserError unless a policy has just one format for keys and one format for values."""
    if policy.exact_tokens or policy.window is not None or policy.eviction is not None or policy.overrides:
        raise UserError(
            f"tune.policies={policy.name}: keeps some tokens or layers in other formats, or not at all; name policies that "
            "have one format for keys and one for values"
        )


def mixed_policy(name: str, formats: Mapping[Place, Format], layers: int) -> KVPolicy:
    """Return the policy with the given format per place: each side's most frequent format, and overrides for other layers."""
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


def mixed_scales(policy: KVPolicy, shape: KVShape, uniform_scales: Sequence[tuple[KVPolicy, KVScales]]) -> KVScales:
    """Return a policy's static scales. Each place gets those of a uniform policy with the same format."""

    def of(layer: int, side: Side, form: Format) -> SideScales:
        return next(scales.layers[layer][side] for uniform, scales in uniform_scales if uniform.sides(layer)[side] == form)

    return KVScales(
        layers=tuple(
            {side: of(layer, side, form) for side, form in policy.sides(layer).items() if form.has_static_scales}
            for layer in range(shape.layers)
        )
    )


class Sensitivity(Record):
    """Cost of quantizing only one layer's keys or values, by format. Everything else stays at 16 bits."""

    layer: int
    side: Side
    kl: dict[str, Number]
    """Mean KL in nats per token on the search texts, by the uniform policy that the format comes from."""


class MeasuredPolicy(Record):
    """A policy, measured with all its formats at once."""

    policy: KVPolicy
    origin: Literal["uniform", "tuned"]
    bytes_per_token: int
    kl: Number
    """Mean KL in nats per token on the texts for whole policies."""


class TuneReport(Record):
    """The record of `stage=tune`."""

    schema_version: Literal[2] = 2
    max_kl: float
    tokens: dict[str, int]
    """Part of the texts -> number of scored tokens."""
    sensitivities: list[Sensitivity]
    measured: list[MeasuredPolicy]
    chosen: str | None
    """Policy with the fewest bytes whose measured KL is within `max_kl`; None unless it has fewer bytes than 16 bits."""


def choose(measured: Sequence[MeasuredPolicy], max_kl: float, exact_bytes: int) -> MeasuredPolicy | None:
    """Return the policy with the fewest bytes, below `exact_bytes`, whose measured KL is within `max_kl`."""
    within = [entry for entry in measured if or_infinite(entry.kl) <= max_kl and entry.bytes_per_token < exact_bytes]
    return min(within, key=lambda entry: (entry.bytes_per_token, or_infinite(entry.kl)), default=None)
