"""Configuration of backend=trtllm."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stages.core.strict import StrictModel
from stages.engines.config import InterpreterConfig
from stages.policies.policy import PAGE_TOKENS

TargetName = Literal["engine", "pytorch"]


class Serving(StrictModel):
    """Options of `trtllm-serve` other than the cache's format."""

    enable_block_reuse: bool
    """Whether prompts share the blocks of equal prefixes; only target=pytorch reads it."""
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of the free GPU memory, after loading the weights, that the cache may use."""


class TrtllmConfig(InterpreterConfig):
    """Configuration of backend=trtllm."""

    name: Literal["trtllm"]
    length_key = "max_seq_len"
    takes_quantized = ("modelopt",)
    finer = ("fp8", "int8_tensor")
    target: TargetName
    """pytorch: the checkpoint and LLM arguments for `trtllm-serve`. engine: a TensorRT engine, which release 1.2 builds."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)]
    """Number of GPUs that the model is split over."""
    max_batch_size: Annotated[int, Field(ge=1, le=4096)]
    """Maximum concurrent sequences."""
    max_input_len: Annotated[int, Field(ge=1)]
    """Maximum tokens per prompt."""
    max_seq_len: Annotated[int, Field(ge=2)]
    """Maximum tokens per sequence, including prompt and answer."""
    max_num_tokens: Annotated[int, Field(ge=1)]
    """Maximum tokens per step, over all sequences."""
    serving: Serving

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target == "engine" and not self.serving.enable_block_reuse:
            raise ValueError("serving.enable_block_reuse=false: target=engine ignores it; leave it at true")
        if self.max_input_len >= self.max_seq_len:
            raise ValueError(f"max_input_len={self.max_input_len}: must be below max_seq_len={self.max_seq_len}")
        if self.max_input_len > self.max_num_tokens:
            raise ValueError(f"max_num_tokens={self.max_num_tokens}: must hold a prompt of max_input_len={self.max_input_len}")
        # TensorRT-LLM would silently clamp the value to this range (tensorrt_llm/builder.py).
        largest = self.max_batch_size * self.max_seq_len
        if not PAGE_TOKENS <= self.max_num_tokens <= largest:
            raise ValueError(
                f"max_num_tokens={self.max_num_tokens}: must be {PAGE_TOKENS} (a block of the cache) to {largest} "
                f"(max_batch_size * max_seq_len)"
            )
        return self
