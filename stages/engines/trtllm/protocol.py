"""What the worker in TensorRT-LLM's interpreter answers: one record for each request, so that nothing else is taken for one."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.core.strict import StrictModel

PROTOCOL = 1


class Done(StrictModel):
    """build, open."""


class Gpu(StrictModel):
    name: str
    compute_cap: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    """8.9"""
    driver_version: str


class Described(StrictModel):
    """describe"""

    protocol: Literal[1]
    release: Annotated[str, Field(pattern=r"^\d+\.\d+")]
    python: str
    gpus: list[Gpu]
    """Those that CUDA shows a process, in its order: rank r runs on number r."""


class Validated(StrictModel):
    """validate"""

    llm_args: dict[str, Any]


class Generated(StrictModel):
    tokens: list[int]
    logits: str
    """A file of float32, little-endian."""
    shape: Annotated[list[int], Field(min_length=2, max_length=2)]
    """(rows, vocabulary)"""


class Ran(StrictModel):
    """run"""

    answers: list[Generated]


class Loaded(StrictModel):
    """load: milliseconds."""

    first_token_ms: list[float]
    step_ms: list[float]
