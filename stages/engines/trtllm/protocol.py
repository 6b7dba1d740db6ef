"""What the worker in TensorRT-LLM's interpreter answers besides what every worker does."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.core.strict import StrictModel


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
