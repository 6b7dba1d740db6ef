"""Configuration of backend=llamacpp."""

from typing import Annotated, Literal

from pydantic import Field

from pipeline.core.kv import PAGE_TOKENS
from stages.engines.interpreter.config import InterpreterConfig


class LlamaCppConfig(InterpreterConfig):
    """llama.cpp: the arguments of a context, by their own names."""

    name: Literal["llamacpp"]
    length_key = "n_ctx"
    finer = ("llamacpp_q8k_q4v", "llamacpp_q8_0")
    threads: Annotated[int, Field(ge=1, le=1024)] | None
    """CPU threads of the engine; null takes all cores that this process may use."""
    flash_attn: bool
    """Whether attention is one operator. llama.cpp quantizes values only with it."""
    n_ctx: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Most tokens of one sequence, prompt and answer together; each of n_seq_max has memory for as many."""
    n_seq_max: Annotated[int, Field(ge=1, le=256)]
    """Most sequences at once."""
    n_batch: Annotated[int, Field(ge=1)]
    """Most tokens of one step, over all its sequences."""
