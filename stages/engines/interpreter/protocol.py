"""The answers of a worker that are the same in every interpreter: one strict record for each request."""

from typing import Annotated

from pydantic import Field

from pipeline.core.strict import StrictModel

PROTOCOL = 1


class Device(StrictModel):
    """A GPU that CUDA shows a worker."""

    name: str
    compute_cap: Annotated[str, Field(pattern=r"^\d+\.\d+$")]


class EmptyAnswer(StrictModel):
    """Answer to `build` and `open`."""


class Generation(StrictModel):
    """The tokens and logits of one request of `run`."""

    tokens: list[int]
    logits: str
    """A file of float32, little-endian."""
    shape: Annotated[list[int], Field(min_length=2, max_length=2)]
    """(rows, vocabulary)"""


class RunAnswer(StrictModel):
    """Answer to `run`."""

    answers: list[Generation]


class Loaded(StrictModel):
    """Answer to `load`: milliseconds."""

    first_token_ms: list[float]
    step_ms: list[float]
