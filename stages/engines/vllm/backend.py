"""Implements backend=vllm: maps a policy to a cache type, and builds bundles of a checkpoint, its scales and engine arguments.

Unsupported configurations are refused before any work.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import Field

from stages.checkpoints.description import CheckpointInfo
from stages.checkpoints.exports import describe_format, single_format_refusal
from stages.checkpoints.quantized import Quantized
from stages.core.errors import MissingRequirement, UserError
from stages.core.memory import GIB
from stages.core.strict import StrictModel
from stages.engines.backend import ROUNDING, Job
from stages.engines.bundle import read_scales
from stages.engines.config import InterpreterConfig
from stages.engines.interpreter import protocol
from stages.engines.interpreter.backend import CHECKPOINT, InterpreterBackend, ServedBundle, cannot_hold
from stages.engines.interpreter.process import Interpreter, Program
from stages.engines.vllm import worker
from stages.engines.vllm.checkpoint import delivers_scales, write_checkpoint
from stages.engines.vllm.config import VllmConfig
from stages.policies.formats import Format
from stages.policies.policy import KVPolicy
from stages.policies.scales import SCALES_FILE


class VllmDescription(protocol.Description):
    """Answer to `describe`."""

    platform: str
    """vLLM's platform: cpu, cuda, or its name for another device."""
    cache_dtypes: Annotated[list[str], Field(min_length=1)]
    refused: dict[str, str]
    """Cache types that this machine does not support -> reason."""


class VllmFacts(StrictModel):
    """Answer to `facts`: scales and blocks of a loaded engine."""

    scales: list[Annotated[dict[Literal["key", "value"], list[float]], Field(min_length=2)]]
    """The scales that each attention layer reads."""
    block_tokens: Annotated[int, Field(ge=1)]
    block_bytes: Annotated[int, Field(ge=1)]
    """Bytes of one block over all layers."""


CHECKED_RELEASES = ("0.26", "0.32", "0.33")
"""Releases whose sources the worker was checked against; the first is recommended."""
PROGRAM = Program(
    "vllm",
    "vLLM",
    Path(worker.__file__).with_name("kvgate_vllm_worker.py"),
    "make vllm installs vLLM's CPU build into .venv-vllm: backend.python=.venv-vllm/bin/python; on a GPU machine run kvgate in "
    f"the container vllm/vllm-openai:v{CHECKED_RELEASES[0]}.0 with backend.python=python3, or give the python of an "
    f"environment with pip install vllm=={CHECKED_RELEASES[0]}.0",
    {
        # Models are local directories, and only the release's own code runs: no hub access, no installed plugins.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # Run the engine inside the worker, with the model runner that supports logits processors.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    },
    checked_releases=CHECKED_RELEASES,
    oldest_release=(0, 26),
    description=VllmDescription,
)
"""vLLM's worker. Releases before 0.26 are refused, because they lack names that the worker uses."""


def on_cpu(interpreter: Interpreter) -> bool:
    return bool(interpreter.description.platform == "cpu")


CHOICES = "kv=fp16, bf16, fp8, fp8_uncalibrated, fp8_head or fp8_e5m2; of GPUs also nvfp4, vllm_int8, vllm_fp8 and vllm_int4"


def cache_dtype(policy: KVPolicy, config: VllmConfig) -> str:
    """Return vLLM's cache type that stores a policy; skipped layers stay at 16 bits. Raises UserError if there is none."""
    key = policy.key
    # vLLM has types for some pairs of key and value formats.
    pair = policy.value.code.vllm_by_key_format.get(describe_format(key)) if key.scale != "calibrated" else None
    plain = key.arithmetic != "kvgate" or (key.symmetric and key.rotation == "none")
    single = "auto" if key.exact else key.code.vllm.get(key.granularity) if plain else None
    dtype = pair or single
    reason = _reason(policy if pair is None else policy.model_copy(update={"key": policy.value}), key, dtype, config)
    if reason is not None:
        raise UserError(cannot_hold(policy, "vllm", reason, CHOICES))
    assert dtype is not None
    return dtype


def _reason(policy: KVPolicy, key: Format, dtype: str | None, config: VllmConfig) -> str | None:
    """Return why vLLM's cache type `dtype` cannot store a policy; None if it can."""
    skips = skipped_layers(policy)
    if reason := single_format_refusal(policy if skips is None else policy.model_copy(update={"overrides": ()})):
        return reason
    if skips and key.exact:
        return "vLLM gives skipped layers the type of the other layers"
    if key.dtype == "fp8_e5m2" and key.scale != "uncalibrated":
        return "it reads E5M2 only at scale 1.0"
    if not dtype:
        return f"{describe_format(key)} is not supported by this engine"
    if key.dtype == "bf16" and config.dtype != "bfloat16":
        return f"without a quantized cache its type is backend.dtype={config.dtype}"
    return None


def skipped_layers(policy: KVPolicy) -> list[str] | None:
    """Return the layers that stay at 16 bits, as `kv_cache_dtype_skip_layers` names them; None for any other override."""
    if not all(override.key and override.key.exact and override.value == override.key for override in policy.overrides):
        return None
    return sorted(str(layer) for override in policy.overrides for layer in override.layers)


def check_boundaries(policy: KVPolicy, dtype: str, layers: int) -> None:
    """Raise UserError if a policy quantizes layers that vLLM keeps at 16 bits: the first and last two, for some cache types."""
    count = min(2, layers // 2)
    boundary = {*range(count), *range(layers - count, layers)}
    if policy.value.code.vllm_by_key_format and not boundary <= set(map(int, skipped_layers(policy) or ())):
        raise UserError(
            f"kv={policy.name}: with {dtype}, vLLM keeps layers {', '.join(map(str, sorted(boundary)))} at 16 bits: set "
            f"'kv.overrides=[{{layers: {sorted(boundary)}, key: {{dtype: fp16}}, value: {{dtype: fp16}}}}]'"
        )


def check_quantized(policy: KVPolicy, quantized: Quantized) -> None:
    scaled = policy.key.has_static_scales and policy.key.dtype != "fp8_e5m2"
    if scaled and quantized.method not in ("compressed-tensors", "modelopt"):
        raise UserError(f"kv={policy.name}: vLLM reads no cache scales with {quantized.title}; choose kv=fp8_e5m2")
    if policy.key.dtype == "fp8_e5m2" and quantized.method == "modelopt":
        raise UserError(f"kv={policy.name}: vLLM does not support E5M2 with {quantized.title}; choose kv=fp8")


def check_split(ranks: int, q_heads: int, kv_heads: int) -> None:
    """Raise UserError if `ranks` workers cannot split the heads. Several workers may share a KV head."""
    for heads, title, repeats in ((q_heads, "query", False), (kv_heads, "KV", True)):
        if heads % ranks and not (repeats and ranks % heads == 0):
            raise UserError(
                f"backend.tensor_parallel_size={ranks}: does not divide the model's {heads} {title} heads; use a divisor"
            )


def refuse_dtype(policy: KVPolicy, dtype: str, interpreter: Interpreter) -> None:
    """Raise UserError for a cache type that the installed release or this machine does not support."""
    described = interpreter.description
    if dtype not in described.cache_dtypes:
        supported = ", ".join(described.cache_dtypes)
        raise UserError(f"kv={policy.name}: vLLM {described.release} has no cache of type {dtype}; it supports {supported}")
    reason = described.refused.get(dtype)
    if reason is not None:
        raise UserError(
            f"kv={policy.name}: a cache of type {dtype} cannot run here ({reason}); choose kv=fp16, or another machine"
        )


def check_judging(config: VllmConfig, interpreter: Interpreter) -> None:
    """Raise MissingRequirement for a configuration that this machine can build but not evaluate."""
    if interpreter.description.platform not in ("cpu", "cuda"):
        raise MissingRequirement(
            f"backend.python={config.python}: vLLM runs on {interpreter.description.platform} there, which is not tested: give "
            "a Python whose vLLM runs on a CPU or on CUDA"
        )
    ranks, gpus = config.tensor_parallel_size, len(interpreter.devices)
    if gpus < ranks and not on_cpu(interpreter):
        raise MissingRequirement(
            f"backend.tensor_parallel_size={ranks}: an evaluation needs {ranks} GPUs, but this machine has {gpus}; build here "
            "with stage=build, or evaluate on a larger machine"
        )


FIXED = {
    "block_size": 64,  # like a page of kvgate; attention on a CPU needs multiples of 32
    "enable_chunked_prefill": True,  # vLLM's own default
    "trust_remote_code": False,
    "load_format": "safetensors",
    "seed": 0,
}
"""Engine arguments that no configuration changes."""
NOT_ENGINE_ARGS = ("threads", "kv_cache_gib")
"""Keys of the configuration that are not engine arguments, or have another name as an engine argument."""
ENGINE_ARGS_FILE = "engine_args.yaml"
"""File for `vllm serve BUNDLE/checkpoint --config BUNDLE/engine_args.yaml`."""


class VllmBundle(ServedBundle):
    """`bundle.json`."""

    platform: str
    """vLLM's platform: cpu or cuda."""
    kv_scales_in_checkpoint: bool


def engine_args(config: VllmConfig, cache_dtype: str, skipped: Sequence[str] = ()) -> dict[str, Any]:
    """Return the engine arguments for serving, under the names of vLLM's EngineArgs."""
    configured = config.model_dump(exclude={*NOT_ENGINE_ARGS, *InterpreterConfig.model_fields})
    step_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    arguments: dict[str, Any] = {**configured, "max_num_batched_tokens": step_tokens, "kv_cache_dtype": cache_dtype, **FIXED}
    if skipped:
        arguments["kv_cache_dtype_skip_layers"] = list(skipped)
    if config.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * GIB)
    return arguments


class VllmBackend(InterpreterBackend[VllmConfig]):
    """A backend whose bundle is the checkpoint with its scales and the engine arguments of `vllm serve`."""

    program = PROGRAM
    record = VllmBundle
    running_keys = ("threads",)

    @property
    def rounding(self) -> float | None:
        """None on a GPU, where vLLM's kernels choose how they quantize queries and accumulate."""
        return ROUNDING[self.config.dtype] if on_cpu(self.interpreter) else None

    @property
    def measures_rounding(self) -> bool:
        """True for 16-bit activations: vLLM's kernels choose the order of sums, so a fixed bound would be too tight."""
        return self.config.dtype != "float32"

    def check_inputs(self, job: Job) -> None:
        if not job.builds:
            return
        config, checkpoint = self.config, job.checkpoint
        dtype = cache_dtype(job.policy, config)  # refuses a policy without starting the interpreter
        check_boundaries(job.policy, dtype, checkpoint.shape.layers)
        self._check_checkpoint(job, ", or judge quantized weights with backend=trtllm")
        if checkpoint.quantized is not None:
            check_quantized(job.policy, checkpoint.quantized)
        check_split(config.tensor_parallel_size, checkpoint.q_heads, checkpoint.shape.kv_heads)
        refuse_dtype(job.policy, dtype, self.interpreter)
        if job.judges:
            check_judging(config, self.interpreter)

    def build_parts(self) -> dict[str, object]:
        """Return the inherited parts and the platform, for which vLLM resolves its arguments."""
        return {**super().build_parts(), "platform": self.interpreter.description.platform}

    def write_served(self, out: Path, info: CheckpointInfo, policy: KVPolicy) -> dict[str, Any]:
        write_checkpoint(info, out / CHECKPOINT, policy, read_scales(out / SCALES_FILE, policy, info.shape))
        arguments = engine_args(self.config, cache_dtype(policy, self.config), skipped_layers(policy) or [])
        self._check_arguments(out / CHECKPOINT, "engine_args", arguments)
        flags = OmegaConf.to_yaml({name.replace("_", "-"): value for name, value in arguments.items()})
        command = f"# vLLM {self.interpreter.release}: vllm serve {CHECKPOINT} --config {ENGINE_ARGS_FILE}"
        (out / ENGINE_ARGS_FILE).write_text(f"{command}\n{flags}", encoding="utf-8")
        return {
            "max_batch": self.config.max_num_seqs,
            "arguments": arguments,
            "platform": self.interpreter.description.platform,
            "kv_scales_in_checkpoint": delivers_scales(policy),
        }


open_backend = VllmBackend
