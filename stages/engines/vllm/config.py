"""Configuration of backend=vllm."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.kv import PAGE_TOKENS
from stages.engines.interpreter.config import InterpreterConfig


class VllmConfig(InterpreterConfig):
    """vLLM: the arguments of `vllm serve`, by their own names."""

    name: Literal["vllm"]
    length_key = "max_model_len"
    takes_quantized = True
    threads: Annotated[int, Field(ge=1, le=1024)] | None
    """CPU threads of each worker; null leaves a single worker to vLLM, which binds it to all cores; several share the cores."""
    dtype: Literal["float16", "bfloat16", "float32"]
    """Type of activations and of a cache that is not quantized."""
    block_size: Literal[16, 32, 64, 128, 256]
    """Tokens of a block of the cache. vLLM's attention on a CPU takes multiples of 32."""
    max_model_len: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Most tokens of one sequence, prompt and answer together."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)]
    """Most sequences of a step."""
    max_num_batched_tokens: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Most tokens that one step processes, over all its sequences; a longer prompt is prefilled in chunks of so many."""
    enable_chunked_prefill: bool
    """Whether a prompt may be prefilled in several steps."""
    enable_prefix_caching: bool
    """Of serving. An evaluation runs without it, and compares what a reused prefix gives by itself."""
    enforce_eager: bool
    """Whether the model runs as it is, without torch.compile and CUDA graphs."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)]
    """Workers that share the model, each with its part of the KV heads: GPUs, or processes on a CPU."""
    kv_cache_gib: Annotated[float, Field(gt=0, le=4096)] | None
    """Memory of each worker's cache; null is what gpu_memory_utilization leaves."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    """Share of a GPU's memory that vLLM may take."""

    @model_validator(mode="after")
    def _a_prompt_fits_a_step(self) -> Self:
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: enable_chunked_prefill=false needs at least "
                f"max_model_len={self.max_model_len}"
            )
        return self
