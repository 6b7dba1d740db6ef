"""`routing.*` and `monitor.*` on the command line."""

from typing import Annotated

from pydantic import Field

from pipeline.core.strict import PathText, StrictModel

Share = Annotated[float, Field(gt=0, lt=1)]


class RoutingConfig(StrictModel):
    """What stage=route does: one of the two."""

    file: PathText | None
    """The routing file: class of work -> policy and fallback."""
    rollback: Annotated[str, Field(min_length=1)] | None
    """A class whose route goes back to the one before."""


class MonitorConfig(StrictModel):
    """The snapshot of stage=monitor, and the limits that break a monitor."""

    snapshot: PathText | None
    """Counts of a serving fleet by class of work, a JSON file."""
    alpha: Annotated[float, Field(gt=0, le=0.05)]
    """One-sided error of each monitor in one snapshot."""
    min_within_limit: Share
    """Of the requests: the share within `limit_ms`."""
    min_json_validity: Share
    """Of the answers: the least share that is valid JSON."""
    min_canary_accuracy: Share
    """Of questions with known answers in the traffic: the least share that is answered rightly."""
    max_live_share: Annotated[float, Field(gt=0, le=1)]
    """Of the tokens that fit; more is memory pressure."""
    max_age_s: Annotated[int, Field(ge=1)]
    """Seconds between now and `taken_at`; a snapshot that is farther away is refused."""
