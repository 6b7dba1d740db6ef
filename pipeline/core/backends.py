"""The configuration of each backend: one record each, told apart by `name`.

`folder` is the folder of `stages/engines` whose `backend.py` builds and runs its engines.
"""

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

import psutil
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pipeline.core.kv import PAGE_TOKENS
from pipeline.core.strict import PathText, StrictModel


class _BackendConfig(StrictModel):
    @property
    def folder(self) -> str:
        """Folder of `stages/engines` with the backend's `backend.py`."""
        raise NotImplementedError

    @property
    def context_limit(self) -> int | None:
        """Most tokens of a sequence that its engines are made for; None where only the model limits them."""
        return None


class _ThreadedConfig(_BackendConfig):
    threads: Annotated[int, Field(ge=1, le=1024)]
    """CPU threads that one engine uses. null in a configuration is this machine's physical cores."""

    @field_validator("threads", mode="before")
    @classmethod
    def _all_cores(cls, threads: object) -> object:
        if threads is not None:
            return threads
        # Decided here and once: the number is part of an evaluation's key. Where cores cannot be told, their threads are.
        return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


class GraphConfig(_BackendConfig):
    """A backend whose engines are built from the exported ONNX decoder."""

    compute_dtype: Literal["float32", "float16", "bfloat16"]
    """Type of activations and weights; part of the graph's digest. With bfloat16 keys and values are quantized, and attended
    to where no plugin does, in float32. TensorRT alone runs such graphs."""


CpuAttention = Literal["auto", "native", "graph"]


class OnnxRuntimeConfig(GraphConfig, _ThreadedConfig):
    """The embedded engine: ONNX Runtime executes the graphs, on any CPU."""

    name: Literal["onnxruntime"]
    attention: CpuAttention
    """What computes a decode step's attention: the kernel that is compiled on this machine, or the graph's own operators.
    auto is native where there is a C compiler."""

    @property
    def folder(self) -> str:
        return "onnx"


class TorchConfig(_ThreadedConfig):
    """The oracle on a CPU; the attention kernels on a GPU."""

    name: Literal["torch"]
    device: Literal["auto", "cpu", "cuda"]
    """auto is cuda where torch finds a GPU."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations on a GPU. Keys and values are quantized in float32 whatever it is."""

    @model_validator(mode="after")
    def _oracle_is_exact(self) -> Self:
        if self.device == "cpu" and self.compute_dtype != "float32":
            raise ValueError(
                f"compute_dtype={self.compute_dtype}: on a CPU backend=torch is the oracle, which computes in float32; set "
                "backend.device=cuda, or backend.compute_dtype=float32"
            )
        return self

    @property
    def folder(self) -> str:
        return "oracle" if self.device == "cpu" else "cuda"


class PlanConfig(GraphConfig):
    """TensorRT plans of the ONNX engine's own graphs."""

    name: str
    max_batch: Annotated[int, Field(ge=1, le=1024)]
    """Most sequences of a decode step."""
    max_tokens: Annotated[int, Field(ge=PAGE_TOKENS, le=1 << 20, multiple_of=PAGE_TOKENS)]
    """Most tokens of one sequence. Loading the engine allocates a pool for max_batch sequences of this length."""
    cuda_graphs: bool
    """Whether decode steps are captured once per shape and replayed."""

    @property
    def context_limit(self) -> int:
        return self.max_tokens

    @property
    def folder(self) -> str:
        return "tensorrt"


class TensorRTConfig(PlanConfig):
    """TensorRT: builds on the GPU that will run the plans, with the attention plugin in them."""

    name: Literal["tensorrt"]


RTX_TARGETS = (75, 80, 86, 89, 120, 121)
"""Compute capabilities that TensorRT for RTX 1.7 builds for (tensorrt_rtx.ComputeCapability)."""


class TensorRTRTXConfig(PlanConfig):
    """TensorRT for RTX, which builds plans for the named GPUs on a machine that need not have one."""

    name: Literal["tensorrt_rtx"]
    compute_capabilities: Annotated[tuple[int, ...], Field(strict=False)]
    """GPUs that the plans have code for: 89 is SM 8.9."""

    @field_validator("compute_capabilities", mode="before")
    @classmethod
    def _is_a_list(cls, value: object) -> object:
        if type(value) is int:
            raise PydanticCustomError("one_target", "is a list: write [{target}]", {"target": value})
        return value

    @model_validator(mode="after")
    def _has_targets(self) -> Self:
        if not self.compute_capabilities or not set(self.compute_capabilities) <= set(RTX_TARGETS):
            listed = ", ".join(map(str, RTX_TARGETS))
            raise ValueError(f"compute_capabilities={list(self.compute_capabilities)}: name some of {listed}")
        return self


Switch = Literal["auto", "enable", "disable"]


class Speculation(StrictModel):
    """Speculative decoding while serving; an evaluation decodes without it."""

    decoding_type: Literal["NGram", "Draft_Target", "Eagle3"]
    max_draft_len: Annotated[int, Field(ge=1, le=64)]
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
    host_cache_gib: Annotated[float, Field(ge=0, le=4096)]
    """Host memory for blocks that were pushed out of the GPU; 0 is none."""
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of the GPU memory that is free after loading the weights, which the cache may take."""
    attention_windows: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, strict=False)] | None
    """Tokens that a layer attends to, repeated over the layers; null is all."""
    speculation: Speculation | None


class TrtllmConfig(_BackendConfig):
    """TensorRT-LLM, in an interpreter of its own."""

    name: Literal["trtllm"]
    target: Literal["auto", "engine", "pytorch"]
    """engine: a TensorRT engine, release 1.2; pytorch: checkpoint and LLM arguments, from 1.3 on; auto: by the release."""
    python: PathText | None
    """The Python that has TensorRT-LLM: a path, or a command on PATH."""
    build_timeout_s: Annotated[int, Field(ge=1)]
    request_timeout_s: Annotated[int, Field(ge=1)]
    """Seconds that loading an engine may take, and also each batch of requests."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)]
    max_batch_size: Annotated[int, Field(ge=1, le=4096)]
    max_input_len: Annotated[int, Field(ge=1)]
    max_seq_len: Annotated[int, Field(ge=2)]
    """Most tokens of one sequence, prompt and answer together."""
    max_num_tokens: Annotated[int, Field(ge=1)]
    """Most tokens that one step processes, over all its sequences."""
    paged_context_fmha: Switch
    """Whether prompts attend through the paged cache, which block reuse and chunked prompts need. auto: where TensorRT-LLM
    keeps it."""
    fp8_context_fmha: Switch
    gather_context_logits: bool
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

    @property
    def context_limit(self) -> int:
        return self.max_seq_len

    @property
    def folder(self) -> str:
        return "trtllm"


class VllmConfig(_BackendConfig):
    """vLLM, in an interpreter of its own: the arguments of `vllm serve`, by their own names."""

    name: Literal["vllm"]
    python: PathText | None
    """The Python that has vLLM: a path, or a command on PATH."""
    request_timeout_s: Annotated[int, Field(ge=1)]
    """Seconds that loading a model may take, and also each batch of requests."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None
    """CPU threads of the engine; null leaves it to vLLM, which binds them to all cores."""
    dtype: Literal["float16", "bfloat16", "float32"]
    """Type of activations and of a cache that is not quantized."""
    kv_cache_dtype: str | None
    """A type of the cache by the release's own name; null is the one that means what the policy says."""
    block_size: Literal[16, 32, 64, 128, 256]
    """Tokens of a block of the cache. vLLM's attention on a CPU takes multiples of 32."""
    max_model_len: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Most tokens of one sequence, prompt and answer together."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)]
    """Most sequences of a step."""
    max_num_batched_tokens: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Most tokens that one step processes, over all its sequences; a longer prompt is prefilled in chunks of so many."""
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    """Of serving. An evaluation runs without it, and compares what a reused prefix gives by itself."""
    enforce_eager: bool
    """Whether the model runs as it is, without torch.compile and CUDA graphs."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)]
    kv_cache_gib: Annotated[float, Field(gt=0, le=4096)] | None
    """Memory of the cache; null is what gpu_memory_utilization leaves."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]

    @model_validator(mode="after")
    def _a_prompt_fits_a_step(self) -> Self:
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: enable_chunked_prefill=false needs at least "
                f"max_model_len={self.max_model_len}"
            )
        return self

    @property
    def context_limit(self) -> int:
        return self.max_model_len

    @property
    def folder(self) -> str:
        return "vllm"


class SglangConfig(_BackendConfig):
    """SGLang, in an interpreter of its own: the arguments of its server, by their own names."""

    name: Literal["sglang"]
    python: PathText | None
    """The Python that has SGLang: a path, or a command on PATH."""
    request_timeout_s: Annotated[int, Field(ge=1)]
    """Seconds that loading a model may take, and also each batch of requests."""
    dtype: Literal["float16", "bfloat16"]
    """Type of activations and of a cache that is not quantized."""
    context_length: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Most tokens of one sequence, prompt and answer together."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)]
    chunked_prefill_size: Annotated[int, Field(ge=PAGE_TOKENS)]
    """Tokens of a chunk of a longer prompt."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)]
    """Share of the memory for weights and cache."""
    attention_backend: str | None
    """Kernels of attention by the release's own name; null is its choice."""

    @property
    def context_limit(self) -> int:
        return self.context_length

    @property
    def folder(self) -> str:
        return "sglang"


class OpenAIConfig(_BackendConfig):
    """Servers that speak OpenAI's API, by URL; nothing is built or started."""

    name: Literal["openai"]
    url: str | None
    """The server that is judged, as http://HOST:PORT, with or without /v1."""
    baseline_url: str | None
    """The same engine and model with a 16-bit cache."""
    canary_url: str | None
    """The judged one with a corrupted scale; null where there is none, and then nothing shows that the gates see the cache."""
    model: str | None
    """The name by which all of them serve the model; null is the only one that a server has."""
    api_key_env: str | None
    """Name of the environment variable that holds the key; the key itself is written nowhere."""
    top_logprobs: Annotated[int, Field(ge=10, le=1000)]
    """Most likely tokens whose log-probabilities a request asks for; the top-10 overlap takes ten."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)]
    """Seconds that a request may take."""
    retries: Annotated[int, Field(ge=0, le=100)]
    """How often a request is sent again after a time-out, 429 or 5xx."""

    @field_validator("url", "baseline_url", "canary_url")
    @classmethod
    def _is_a_root(cls, value: str | None) -> str | None:
        if value is None:
            return None
        root = value.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(root)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            parts, whole = urlsplit(""), False
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise PydanticCustomError(
                "secret_url", "holds credentials or a query; give http://HOST:PORT, and a key by backend.api_key_env"
            )
        if not whole:
            raise PydanticCustomError("no_url", "must be http://HOST:PORT or https://HOST:PORT")
        return root

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            raise PydanticCustomError("secret_name", "must be the name of an environment variable, not the key itself")
        return value

    @model_validator(mode="after")
    def _are_different_servers(self) -> Self:
        given = [url for url in (self.url, self.baseline_url, self.canary_url) if url is not None]
        for name in ("baseline_url", "canary_url"):
            url = getattr(self, name)
            if url is not None and given.count(url) > 1:
                raise ValueError(f"{name}={url}: is another one's url as well; give each role a server of its own")
        return self

    @property
    def folder(self) -> str:
        return "openai"


BackendConfig = Annotated[
    OnnxRuntimeConfig
    | TorchConfig
    | TensorRTRTXConfig
    | TensorRTConfig
    | TrtllmConfig
    | VllmConfig
    | SglangConfig
    | OpenAIConfig,
    Field(discriminator="name"),
]
