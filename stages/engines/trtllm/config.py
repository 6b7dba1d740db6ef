"""Configuration of backend=trtllm."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.kv import PAGE_TOKENS
from pipeline.core.strict import PathText, StrictModel
from stages.engines.interpreter.config import InterpreterConfig

Switch = Literal["auto", "enable", "disable"]


class Speculation(StrictModel):
    """Speculative decoding while serving; an evaluation decodes without it."""

    decoding_type: Literal["NGram", "Draft_Target", "Eagle3"]
    """TensorRT-LLM's own name of the method."""
    max_draft_len: Annotated[int, Field(ge=1, le=64)]
    """Most drafted tokens of a pass."""
    speculative_model: PathText | None = None
    """The draft model's directory, where the type has one."""

    @model_validator(mode="after")
    def _has_its_model(self) -> Self:
        if (self.decoding_type == "NGram") != (self.speculative_model is None):
            hint = "leave it null" if self.decoding_type == "NGram" else "give the draft model's directory"
            raise ValueError(f"speculative_model={self.speculative_model}: decoding_type={self.decoding_type}: {hint}")
        return self


class Serving(StrictModel):
    """What `trtllm-serve` is told beyond the cache's format; only target=pytorch has it in its bundle."""

    enable_block_reuse: bool
    """Whether prompts share the blocks of equal beginnings."""
    host_cache_gib: Annotated[float, Field(ge=0, le=4096)]
    """Host memory for blocks that were pushed out of the GPU; 0 is none."""
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of the GPU memory that is free after loading the weights, which the cache may take."""
    attention_windows: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, strict=False)] | None
    """Tokens that a layer attends to, repeated over the layers; null is all."""
    speculation: Speculation | None


class TrtllmConfig(InterpreterConfig):
    """TensorRT-LLM."""

    name: Literal["trtllm"]
    length_key = "max_seq_len"
    takes_quantized = True
    finer = ("fp8", "int8_tensor")
    target: Literal["engine", "pytorch"]
    """pytorch: the checkpoint and LLM arguments for `trtllm-serve`; engine: a TensorRT engine, which release 1.2 builds."""
    build_timeout_s: Annotated[int, Field(ge=1)]
    """Seconds that a build may take."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)]
    """GPUs that share the model."""
    max_batch_size: Annotated[int, Field(ge=1, le=4096)]
    """Most sequences at once."""
    max_input_len: Annotated[int, Field(ge=1)]
    """Most tokens of a prompt."""
    max_seq_len: Annotated[int, Field(ge=2)]
    """Most tokens of one sequence, prompt and answer together."""
    max_num_tokens: Annotated[int, Field(ge=1)]
    """Most tokens that one step processes, over all its sequences."""
    paged_context_fmha: Switch
    """Whether prompts attend through the paged cache, which block reuse and chunked prompts need. auto: where TensorRT-LLM
    keeps it."""
    fp8_context_fmha: Switch
    """Whether prompts attend in FP8. auto: where TensorRT-LLM keeps it."""
    gather_context_logits: bool
    """Whether the engine puts out the logits of whole prompts; an evaluation needs none."""
    allow_rewrites: Annotated[tuple[str, ...], Field(strict=False)]
    """Keys in which the built engine may differ from what was asked; any other difference is an error."""
    serving: Serving

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.max_input_len >= self.max_seq_len:
            raise ValueError(f"max_input_len={self.max_input_len}: must be below max_seq_len={self.max_seq_len}")
        if self.max_input_len > self.max_num_tokens:
            raise ValueError(f"max_num_tokens={self.max_num_tokens}: must hold a prompt of max_input_len={self.max_input_len}")
        # TensorRT-LLM builds with the bound instead, without an error (tensorrt_llm/builder.py).
        largest = self.max_batch_size * self.max_seq_len
        if not PAGE_TOKENS <= self.max_num_tokens <= largest:
            raise ValueError(
                f"max_num_tokens={self.max_num_tokens}: must be {PAGE_TOKENS} (a block of the cache) to {largest} "
                f"(max_batch_size * max_seq_len)"
            )
        return self
