"""Reads a snapshot of the servers' counts, and decides which monitors hold and which are broken.

A monitor of latency or quality compares a share of good requests with its minimum, by exact one-sided bounds (Clopper-Pearson
at MONITOR_ALPHA). The monitor is **broken** if the upper bound is below the minimum. It **holds** if the lower bound reaches
the minimum. Otherwise it is **unknown**: there are too few requests. An unknown monitor alone moves no route. The bounds assume
independent requests. The memory monitor needs no bounds: it compares the share of live tokens with its maximum.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AwareDatetime, Field, ValidationError, field_validator, model_validator

from pipeline.config.config import ClassName, MonitorConfig
from stages.core.errors import UserError, short
from stages.core.strict import StrictModel, Unreadable, absolute_path, first_problem, parse_json, read_file

MAX_BYTES = 1_000_000
MAX_AGE_S = 900
"""Maximum seconds between now and `taken_at` of a snapshot."""
MONITOR_ALPHA = 0.001
"""One-sided error per monitor and snapshot: the maximum probability that a class exactly at its limit counts as broken."""


Count = Annotated[int, Field(ge=0, le=1 << 53)]


class GoodRequests(StrictModel):
    """Number of good requests, out of all counted requests."""

    good: Count
    of: Count

    @model_validator(mode="after")
    def _is_a_share(self) -> Self:
        if self.good > self.of:
            raise ValueError(f"good={self.good} must not be more than of={self.of}")
        return self


class Latency(GoodRequests):
    """Good requests took at most `limit_ms`."""

    limit_ms: Annotated[float, Field(gt=0)]


class Memory(StrictModel):
    live_tokens: Count
    max_tokens: Annotated[int, Field(ge=1, le=1 << 53)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.live_tokens > self.max_tokens:
            raise ValueError(f"live_tokens={self.live_tokens} must not be more than max_tokens={self.max_tokens}")
        return self


class ClassSnapshot(StrictModel):
    """Counts of one class. A monitor that the class does not use must be null; a missing monitor is an error."""

    version: str
    latency: Latency
    json_validity: GoodRequests | None
    canaries: GoodRequests | None
    memory: Memory

    @field_validator("version")
    @classmethod
    def _is_a_number(cls, version: str) -> str:
        if not re.fullmatch("[1-9][0-9]{0,9}", version):
            raise ValueError(f'must be the number of a version, such as "3", got "{short(version)}"')
        return version


class Snapshot(StrictModel):
    taken_at: AwareDatetime | None = None
    classes: Annotated[dict[ClassName, ClassSnapshot], Field(min_length=1)]


def read_snapshot(monitor: MonitorConfig) -> Snapshot:
    """Read the snapshot. Raises UserError for its first problem, or if `taken_at` is more than MAX_AGE_S seconds from now."""
    where = f"monitor.snapshot={monitor.snapshot}"
    try:
        content = read_file(absolute_path(str(monitor.snapshot)), MAX_BYTES)
        parse_json(content)  # refuses repeated keys, of which pydantic takes the last
        snapshot = Snapshot.model_validate_json(content)
    except Unreadable as error:
        raise UserError(f"{where}: {error}") from None
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error)}; correct it") from None
    taken_at = snapshot.taken_at
    away = abs((datetime.now(UTC) - taken_at).total_seconds()) if taken_at is not None else 0
    if taken_at is not None and away > MAX_AGE_S:
        raise UserError(
            f"{where}: taken_at={taken_at.isoformat()} is {away:,.0f} s from now, more than {MAX_AGE_S}; take a new one"
        )
    return snapshot


class Reading(NamedTuple):
    """State of one monitor. The memory monitor is broken under memory pressure, and never unknown: it counts all tokens."""

    kind: Literal["latency", "quality", "memory"]
    name: str
    status: Literal["holds", "broken", "unknown"]
    text: str


def quality_holds(readings: Sequence[Reading]) -> bool:
    """Return whether monitors of quality exist and all are shown to hold."""
    return {reading.status for reading in readings if reading.kind == "quality"} == {"holds"}


def _share_reading(kind: Literal["latency", "quality"], name: str, counted: GoodRequests, min_share: float) -> Reading:
    from scipy.special import betaincinv

    good, bad = counted.good, counted.of - counted.good
    lower = float(betaincinv(good, bad + 1, MONITOR_ALPHA)) if good else 0.0
    upper = float(betaincinv(good + 1, bad, 1 - MONITOR_ALPHA)) if bad else 1.0
    bounds = f"{100 * (1 - MONITOR_ALPHA):g} % bounds {lower:.4f} to {upper:.4f}"
    text = f"{good:,} of {counted.of:,}, {bounds}, minimum {min_share:g}"
    return Reading(kind, name, "broken" if upper < min_share else "holds" if lower >= min_share else "unknown", text)


def read_monitors(snapshot: ClassSnapshot, limits: MonitorConfig) -> list[Reading]:
    latency, memory, max_share = snapshot.latency, snapshot.memory, limits.max_live_share
    readings = [_share_reading("latency", f"latency within {latency.limit_ms:g} ms", latency, limits.min_within_limit)]
    if snapshot.json_validity is not None:
        readings.append(_share_reading("quality", "JSON validity", snapshot.json_validity, limits.min_json_validity))
    if snapshot.canaries is not None:
        readings.append(_share_reading("quality", "canaries", snapshot.canaries, limits.min_canary_accuracy))
    pressure = memory.live_tokens / memory.max_tokens > max_share
    tokens = f"{memory.live_tokens:,} of {memory.max_tokens:,} tokens live, pressure above {max_share:.0%}"
    return [*readings, Reading("memory", "memory", "broken" if pressure else "holds", tokens)]
