"""What the worker in vLLM's interpreter answers besides what every worker does."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.core.strict import StrictModel
from stages.engines.interpreter.protocol import Device, Generation


class Description(StrictModel):
    """Answer to `describe`."""

    protocol: Literal[1]
    release: Annotated[str, Field(pattern=r"^\d+\.\d+")]
    python: str
    torch: str
    platform: str
    """cpu, cuda, or what vLLM calls another one."""
    devices: list[Device]
    cache_dtypes: Annotated[list[str], Field(min_length=1)]
    """Names of the cache's types that the release knows."""
    refused: dict[str, str]
    """Those of them that this machine cannot hold -> why."""


class ValidatedArguments(StrictModel):
    """Answer to `validate`: engine arguments as vLLM resolves them."""

    engine_args: dict[str, Any]


class LayerScales(StrictModel):
    """The scales that one attention layer reads."""

    layer: str
    key: list[float]
    value: list[float]


class Facts(StrictModel):
    """Answer to `facts`: what a loaded engine uses."""

    scales: list[LayerScales]
    cache_dtype: str
    block_tokens: Annotated[int, Field(ge=1)]
    blocks: int
    block_bytes: Annotated[int, Field(ge=1)]
    """Of one block in all layers."""
    kernel: str
    """What computes attention: the CPU's instruction set, or the attention backend."""


class ShownGeneration(Generation):
    """A request of `run` with what the cache holds of it."""

    stored: str = ""
    """A file with keys and then values of every layer; empty where it was not asked for, or the layout is not known."""


class ShownRunAnswer(StrictModel):
    """Answer to `run`."""

    answers: list[ShownGeneration]


class LoadedInBlocks(StrictModel):
    """Answer to `load`: milliseconds, and the most blocks that held tokens."""

    first_token_ms: list[float]
    step_ms: list[float]
    blocks: int
