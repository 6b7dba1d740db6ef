"""Configuration of backend=sglang."""

from typing import Annotated, Literal

from pydantic import Field

from stages.engines.config import InterpreterConfig
from stages.policies.policy import PAGE_TOKENS


class SglangConfig(InterpreterConfig):
    """The arguments of SGLang's server, under their own names."""

    name: Literal["sglang"]
    length_key = "context_length"
    dtype: Literal["float16", "bfloat16"]
    """Type of activations and of an unquantized cache."""
    context_length: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Maximum tokens per sequence, including prompt and answer."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)]
    """Maximum concurrent sequences."""
    chunked_prefill_size: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Tokens per prefill chunk."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of the memory for weights and cache."""
    attention_backend: str | None
    """SGLang's name of the attention kernels; null lets SGLang choose."""
