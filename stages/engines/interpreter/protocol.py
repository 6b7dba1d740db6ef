"""A worker's answers: one strict record per request type. Libraries extend the records with their own fields."""

from typing import Annotated, Any

from pydantic import Field

from stages.core.strict import StrictModel


class Device(StrictModel):
    name: str
    compute_cap: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    """For example `8.9`."""

    def __str__(self) -> str:
        return f"{self.name}, SM {self.compute_cap}"


class Description(StrictModel):
    """Answer to `describe`."""

    release: Annotated[str, Field(pattern=r"^\d+\.\d+")]
    python: str
    devices: list[Device]
    """GPUs in CUDA's order: rank r runs on device r."""


class EmptyAnswer(StrictModel):
    """Answer to `build` and `open`."""


class Resolved(StrictModel):
    """Answer to `validate`: arguments as the library resolved them."""

    arguments: dict[str, Any]


class Pinned(Resolved):
    """Answer to `validate` of TensorRT-LLM."""

    pinned: dict[str, Any]
    """The requested arguments, and further arguments that the release needs."""
    quantization: dict[str, str | None]
    """`quant_algo` and `kv_cache_quant_algo`, as the release reads them from the checkpoint and the arguments."""
    refused: str
    """Why the release refuses the checkpoint; empty if it accepts the checkpoint."""


class Generation(StrictModel):
    """The tokens and logits of one request of `run`."""

    tokens: list[int]
    logits: str
    """Path of a file of little-endian float32 logits."""
    shape: Annotated[list[int], Field(min_length=2, max_length=2)]
    """Shape of the logits: (rows, vocabulary)."""
    stored: str = ""
    """Path of a file with the request's cached bytes; empty if not requested or if the cache's layout is unknown."""
    preempted: int = 0
    """Times that the request lost its blocks and was recomputed, if the library reports preemptions."""
    reused: int = 0
    """Prompt tokens that were taken from the cache."""
    blocks: list[int] = Field(default_factory=list)
    """Block numbers that the request held at its end."""


class RunAnswer(StrictModel):
    """Answer to `run`."""

    answers: list[Generation]


class Loaded(StrictModel):
    """Answer to `load`: times in milliseconds."""

    first_token_ms: list[float]
    step_ms: list[float]
