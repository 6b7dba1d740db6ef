"""Configuration of backend=sglang."""

from typing import Annotated, Literal

from pydantic import Field

from pipeline.core.kv import PAGE_TOKENS
from stages.engines.interpreter.config import InterpreterConfig


class SglangConfig(InterpreterConfig):
    """SGLang: the arguments of its server, by their own names."""

    name: Literal["sglang"]
    length_key = "context_length"
    dtype: Literal["float16", "bfloat16"]
    """Type of activations and of a cache that is not quantized."""
    context_length: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Most tokens of one sequence, prompt and answer together."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)]
    """Most sequences at once."""
    chunked_prefill_size: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Tokens of a chunk of a longer prompt."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)]
    """Share of the memory for weights and cache."""
    attention_backend: str | None
    """Kernels of attention by the release's own name; null is its choice."""
