"""The answers of the worker in TensorRT-LLM's interpreter: one strict record for each request."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.core.strict import StrictModel

PROTOCOL = 1


class EmptyAnswer(StrictModel):
    """Answer to `build` and `open`."""


class Gpu(StrictModel):
    """A GPU that CUDA shows the worker."""

    name: str
    compute_cap: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    """`8.9`"""
    driver_version: str


class Description(StrictModel):
    """Answer to `describe`."""

    protocol: Literal[1]
    release: Annotated[str, Field(pattern=r"^\d+\.\d+")]
    python: str
    gpus: list[Gpu]
    """In CUDA's order: rank r runs on number r."""


class ValidatedArguments(StrictModel):
    """Answer to `validate`."""

    llm_args: dict[str, Any]


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
