"""Configuration of backend=llamacpp."""

from typing import Annotated, Literal

from pydantic import Field

from stages.engines.config import InterpreterConfig
from stages.policies.policy import PAGE_TOKENS


class LlamaCppConfig(InterpreterConfig):
    """The parameters of a llama.cpp context, under their own names."""

    name: Literal["llamacpp"]
    length_key = "n_ctx"
    finer = ("llamacpp_q8k_q4v", "llamacpp_q8_0")
    threads: Annotated[int, Field(ge=1, le=1024)] | None
    """CPU threads of the engine; null uses all cores available to this process."""
    n_ctx: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Maximum tokens per sequence, including prompt and answer. Memory is reserved for n_seq_max such sequences."""
    n_seq_max: Annotated[int, Field(ge=1, le=256)]
    """Maximum concurrent sequences."""
    n_batch: Annotated[int, Field(ge=1)]
    """Maximum tokens per step, over all sequences."""
