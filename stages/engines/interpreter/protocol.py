"""What a worker answers: one strict record for each request. A library's own facts are in records that extend these."""

from typing import Annotated, Any

from pydantic import Field

from pipeline.core.strict import StrictModel


class Device(StrictModel):
    """A GPU that CUDA shows a worker."""

    name: str
    compute_cap: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    """`8.9`"""
    driver: str = ""
    """Version of the driver, where the worker asks for it."""


class Description(StrictModel):
    """Answer to `describe`."""

    release: Annotated[str, Field(pattern=r"^\d+\.\d+")]
    python: str
    devices: list[Device]
    """In CUDA's order: rank r runs on number r."""


class EmptyAnswer(StrictModel):
    """Answer to `build` and `open`."""


class Resolved(StrictModel):
    """Answer to `facts` of SGLang: arguments as the library resolves them."""

    arguments: dict[str, Any]


class Pinned(Resolved):
    """Answer to `validate`."""

    pinned: dict[str, Any]
    """The arguments that were asked for, with what the release needs beside them."""
    quantization: dict[str, str | None]
    """`quant_algo` and `kv_cache_quant_algo`, as the release reads them from the checkpoint and the arguments."""
    refused: str
    """Why the release refuses the checkpoint; empty if it accepts the checkpoint."""


class Generation(StrictModel):
    """The tokens and logits of one request of `run`."""

    tokens: list[int]
    logits: str
    """A file of float32, little-endian."""
    shape: Annotated[list[int], Field(min_length=2, max_length=2)]
    """(rows, vocabulary)"""
    stored: str = ""
    """A file with what the cache holds of the request; empty where it was not asked for, or the layout is not known."""
    preempted: int = 0
    """How often the request lost its blocks and was computed again, where the library tells."""
    reused: int = 0
    """Tokens of its prompt that were taken from the cache."""
    blocks: list[int] = Field(default_factory=list)
    """Those that it held in the end."""


class RunAnswer(StrictModel):
    """Answer to `run`."""

    answers: list[Generation]


class Loaded(StrictModel):
    """Answer to `load`: milliseconds, and the most blocks of the cache that held tokens, where the library tells."""

    first_token_ms: list[float]
    step_ms: list[float]
    blocks: int = 0
