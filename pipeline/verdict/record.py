"""The base of the records that an evaluation writes: frozen, and without unknown keys or numbers that JSON lacks."""

import math

from pydantic import BaseModel, ConfigDict

Number = float | None
"""A measured number; null where it was not finite, because JSON has no NaN."""


class Record(BaseModel):
    """A part of a report or of a verdict."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, allow_inf_nan=False)


def finite(value: Number) -> Number:
    """Return a number as a record holds it."""
    return float(value) if value is not None and math.isfinite(value) else None


def or_infinite(value: Number) -> float:
    """Return a distance that a record holds, infinite where it was not finite."""
    return math.inf if value is None else value
