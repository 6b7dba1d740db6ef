"""Configuration of backend=vllm."""

from typing import Annotated, Literal

from pydantic import Field

from stages.engines.config import InterpreterConfig
from stages.policies.policy import PAGE_TOKENS


class VllmConfig(InterpreterConfig):
    """The arguments of `vllm serve`, under vLLM's own names."""

    name: Literal["vllm"]
    length_key = "max_model_len"
    takes_quantized = ("compressed-tensors", "modelopt", "awq")
    finer = ("fp8", "vllm_int8")
    threads: Annotated[int, Field(ge=1, le=1024)] | None
    """CPU threads per worker. null: vLLM binds a single worker to all cores, and several workers share the cores."""
    dtype: Literal["float16", "bfloat16", "float32"]
    """Type of activations and of an unquantized cache."""
    max_model_len: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Maximum tokens per sequence, including prompt and answer."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)]
    """Maximum sequences per step."""
    max_num_batched_tokens: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Maximum tokens per step, over all sequences. Longer prompts are prefilled in chunks of this size."""
    enable_prefix_caching: bool
    """Whether the served engine reuses cached prefixes. An evaluation disables reuse, except in a full pool."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)]
    """Workers that split the model and its KV heads: one per GPU, or processes on a CPU."""
    kv_cache_gib: Annotated[float, Field(gt=0, le=4096)] | None
    """GiB of cache per worker. null: when serving, vLLM's default, the memory that gpu_memory_utilization leaves; in an
    evaluation, room for two of the longest sequences in 16 bits, but at least 2 GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    """Fraction of a GPU's memory that vLLM may use."""
