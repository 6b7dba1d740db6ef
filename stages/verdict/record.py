"""The base class of the records that an evaluation writes: frozen, without unknown keys, NaN or infinity."""

import math

from pydantic import BaseModel, ConfigDict

Number = float | None
"""A measured number; null if it was not finite, because JSON has no NaN."""


class Record(BaseModel):
    """A part of a report or of a verdict."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, allow_inf_nan=False)


def finite(value: Number) -> Number:
    """Return a number in the form of a record: None if it is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def or_infinite(value: Number) -> float:
    """Return a recorded distance; infinity if the record has null."""
    return math.inf if value is None else value
