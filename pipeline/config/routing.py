"""`routing.*` and `monitor.*` on the command line."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from stages.core.strict import PathText, StrictModel

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
