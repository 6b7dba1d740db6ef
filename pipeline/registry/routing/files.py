"""`routing.*` and `monitor.*`, and the file that the latter name: the snapshot of a fleet."""

from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from stages.core.errors import UserError
from stages.core.strict import PathText, StrictModel, Unreadable, absolute, first_problem, parse_json, read_file

MOST_BYTES = 1_000_000
MAX_AGE_S = 900
"""Maximum seconds between now and `taken_at` of a snapshot."""
PREVIOUS = "-previous"
"""Ending of the alias of a route's previous engine. No class name may have this ending."""


def _is_no_other_alias(name: str) -> str:
    if name.endswith(PREVIOUS):
        raise ValueError(f"must not end with {PREVIOUS}, which routes call their way back")
    return name


def _number_as_text(name: Any) -> Any:
    return str(name) if type(name) is int else name  # `retrieval: 3` is a version


ClassName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$"), AfterValidator(_is_no_other_alias)]
EngineName = Annotated[str, BeforeValidator(_number_as_text), StringConstraints(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Part = Annotated[float, Field(gt=0, lt=1)]


class RoutingConfig(StrictModel):
    """The action of stage=route: set routes, or move a route back."""

    routes: Annotated[dict[ClassName, EngineName], Field(min_length=1)] | None
    """Class of work -> its engine: the name of a registered candidate, or a version's number."""
    rollback: Annotated[str, Field(min_length=1)] | None
    """Class of work whose route moves back to its previous engine."""


class MonitorConfig(StrictModel):
    """The snapshot of stage=monitor, and the limits that break a monitor."""

    snapshot: PathText | None
    """Counts of a serving fleet by class of work, a JSON file."""
    min_within_limit: Part
    """Minimum share of requests that take at most `limit_ms`."""
    min_json_validity: Part
    """Minimum share of answers that are valid JSON."""
    min_canary_accuracy: Part
    """Minimum share of right answers to questions with known answers in the traffic."""
    max_live_share: Annotated[float, Field(gt=0, le=1)]
    """Maximum share of live tokens among the tokens that fit. A larger share is memory pressure."""


class Share(StrictModel):
    """Number of good requests, out of all counted requests."""

    good: Count
    of: Count

    @model_validator(mode="after")
    def _is_a_share(self) -> Self:
        if self.good > self.of:
            raise ValueError(f"good={self.good} must not be more than of={self.of}")
        return self


class Latency(Share):
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

    version: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,9}$")]
    latency: Latency
    json_validity: Share | None
    canaries: Share | None
    memory: Memory


class Snapshot(StrictModel):
    taken_at: AwareDatetime | None = None
    classes: Annotated[dict[ClassName, ClassSnapshot], Field(min_length=1)]


def read_snapshot(monitor: MonitorConfig) -> Snapshot:
    """Read the snapshot. Raises UserError with its first problem, also if the snapshot is too old."""
    where = f"monitor.snapshot={monitor.snapshot}"
    try:
        content = read_file(absolute(str(monitor.snapshot)), MOST_BYTES)
        parse_json(content)  # refuses repeated keys, of which pydantic takes the last
        snapshot = Snapshot.model_validate_json(content)
    except Unreadable as error:
        raise UserError(f"{where}: {error}") from None
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error)}; correct it") from None
    if snapshot.taken_at is not None:
        away = abs((datetime.now(UTC) - snapshot.taken_at).total_seconds())
        if away > MAX_AGE_S:
            raise UserError(
                f"{where}: taken_at={snapshot.taken_at.isoformat()} is {away:,.0f} s from now, more than {MAX_AGE_S}; take a "
                "new one"
            )
    return snapshot
