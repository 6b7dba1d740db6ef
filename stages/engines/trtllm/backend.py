"""Implements backend=trtllm: checks the interpreter, the GPUs and the limits of both targets, and builds bundles."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.checkpoints.description import CheckpointInfo, refuse_other_attention
from stages.checkpoints.exports import TENSORRT_LLM_KV, UNIFIED_HF_KV, export_refusal, tensorrt_llm_refusal
from stages.core.errors import MissingRequirement, UserError
from stages.engines.backend import Artifacts, Job, Source
from stages.engines.bundle import BuiltFor, sm_number
from stages.engines.interpreter.backend import InterpreterBackend, ServedBundle, cannot_hold
from stages.engines.interpreter.process import Interpreter, Program
from stages.engines.interpreter.protocol import Device
from stages.engines.trtllm import worker
from stages.engines.trtllm.config import TargetName, TrtllmConfig
from stages.engines.trtllm.settings import rank_capabilities
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVPolicy

PROGRAM = Program(
    "trtllm",
    "TensorRT-LLM",
    Path(worker.__file__).with_name("kvgate_worker.py"),
    # PyPI itself has only a stub package.
    "run kvgate in the container nvcr.io/nvidia/tensorrt-llm/release:1.2.1 with backend.python=python3, or give the python of "
    "an environment of Python 3.10 or 3.12 with pip install tensorrt-llm==1.2.1 --extra-index-url https://pypi.nvidia.com as "
    "backend.python=PATH",
    {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRTLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    },
    checked_releases=("1.2", "1.3", "1.4"),
    oldest_release=(1, 2),
    package="tensorrt_llm",
    # A worker starts its own MPI world. If it inherited a job launcher's variables, MPI would join the job or fail to start.
    hidden_variables=("OMPI_", "PMI_", "PMIX_", "SLURM_", "I_MPI_", "HYDRA_"),
)  # fmt: skip
"""TensorRT-LLM's worker. It was checked against the sources of the listed releases (tests/contract/facts)."""


def require_gpus(interpreter: Interpreter, count: int, purpose: str) -> None:
    """Raise MissingRequirement if the interpreter sees fewer than `count` GPUs. `purpose`: for example "running an engine"."""
    if len(interpreter.devices) < count:
        raise MissingRequirement(
            f"backend.tensor_parallel_size={count}: {purpose} with TensorRT-LLM {interpreter.release} needs {count} NVIDIA "
            f"GPU(s), {interpreter.python} sees {len(interpreter.devices)}; run it where nvidia-smi lists them (a container "
            "needs --gpus all)"
        )


FP8_SM = 89
"""First SM version on which TensorRT-LLM supports FP8 caches and FP8 weights (8.9)."""
ENGINE_RELEASES = re.compile(r"1\.2(\..*)?|1\.3\.0rc(\d|1\d|20)(\D.*)?")
ENGINES = "1.2 (1.2.1 is the last release that builds engines; release candidates of 1.3 up to 1.3.0rc20 also do)"
NO_INTEGERS_SM = range(100, 120)
"""TensorRT-LLM 1.2 builds neither INT8 caches nor INT8 or INT4 weights for SM 10.0 to 11.9 (tensorrt_llm/builder.py)."""
INTEGER_WEIGHTS: tuple[WeightsFormat, ...] = ("int8_sq", "int4_awq")


@dataclass(frozen=True)
class Target:
    """A way to deploy with TensorRT-LLM."""

    caches: tuple[str, ...]
    """Supported algorithms of a quantized cache; each has one scale per layer."""
    weights: tuple[WeightsFormat, ...]
    sharded_weights: tuple[WeightsFormat, ...]
    """Weights formats that can be split over several GPUs."""
    choices: str
    """Supported policies, as text for a message."""


TARGETS: dict[TargetName, Target] = {
    "engine": Target(
        caches=TENSORRT_LLM_KV,
        weights=("none", "fp8", "int8_sq", "int4_awq"),
        sharded_weights=("none", "fp8"),
        choices="kv=fp16, fp8 or int8_tensor",
    ),
    "pytorch": Target(
        caches=UNIFIED_HF_KV,
        weights=("none", "fp8", "int4_awq"),
        sharded_weights=("none", "fp8", "int4_awq"),
        choices="kv=fp16 or fp8",
    ),
}


def check_judging(name: TargetName, config: TrtllmConfig, policy: KVPolicy, interpreter: Interpreter) -> None:
    """Raise UserError or MissingRequirement for a configuration that can be built but not evaluated."""
    require_gpus(interpreter, config.tensor_parallel_size, "running an engine")
    if not policy.quantized:
        raise UserError(
            f"kv={policy.name}: its cache has no scale, so backend=trtllm has no must-fail control to prove that an evaluation "
            "reads the cache; judge kv=fp8, whose baseline it is, or build it with stage=build"
        )
    if name == "pytorch" and config.tensor_parallel_size > 1:
        raise UserError(
            f"backend.tensor_parallel_size={config.tensor_parallel_size}: target=pytorch is evaluated in one process, because "
            "only there the must-fail control can reach its layers: evaluate with 1, build with stage=build"
        )


def require_target(target: TargetName, installed: Interpreter) -> None:
    if target == "engine" and ENGINE_RELEASES.fullmatch(installed.release) is None:
        raise MissingRequirement(
            f"backend.python={installed.python}: has TensorRT-LLM {installed.release}, backend.target=engine needs {ENGINES}; "
            f"set backend.target=pytorch, or {PROGRAM.hint}"
        )


def target_refusal(name: TargetName, policy: KVPolicy, weights: WeightsFormat, info: CheckpointInfo, ranks: int) -> str | None:
    """Return why the target does not support this combination, with key, value and fix; None if it does."""
    target = TARGETS[name]
    reason = export_refusal(policy, target.caches)
    if reason is not None:
        engine = TARGETS["engine"]
        older = "" if export_refusal(policy, engine.caches) else f", backend.target=engine with TensorRT-LLM {ENGINES}"
        return cannot_hold(policy, f"trtllm, target {name},", reason, f"{target.choices}{older}")
    if weights not in target.weights:
        return f"weights={weights}: backend.target={name} supports {', '.join(target.weights)}; choose one of them"
    if info.quantized is not None:
        reason = "weights that are already quantized" if name == "engine" else info.quantized.other_than_modelopt
        if reason is not None:
            return f"model.path={info.path}: backend.target={name}: {reason}; use backend=vllm"
    reason = tensorrt_llm_refusal(info) if name == "engine" else None
    if reason is not None:
        return f"model.path={info.path}: {reason}; use backend.target=pytorch"
    return _split_refusal(target, weights, info, ranks) if ranks > 1 else None


def _split_refusal(target: Target, weights: WeightsFormat, info: CheckpointInfo, ranks: int) -> str | None:
    if weights not in target.sharded_weights:
        return (
            f"backend.tensor_parallel_size={ranks}: weights={weights} are not split over GPUs here; use 1, or weights="
            f"{' or '.join(target.sharded_weights)}"
        )
    parts = {
        "KV heads": info.shape.kv_heads,
        "tokens in the vocabulary": info.vocab_size,
        "columns of the MLP": info.intermediate_size,
    }
    for part, count in parts.items():
        if count % ranks:
            return f"backend.tensor_parallel_size={ranks}: does not divide the model's {count} {part}; use a divisor"
    return None


def refuse_gpus(target: TargetName, policy: KVPolicy, weights: WeightsFormat, gpus: Sequence[Device]) -> None:
    """Raise UserError for a cache or weights that TensorRT-LLM does not build for one of the GPUs."""
    for gpu in gpus:
        sm = sm_number(gpu.compute_cap)
        integers, fp8 = target == "pytorch" or sm not in NO_INTEGERS_SM, sm >= FP8_SM
        if not integers and policy.key.dtype == "int8":
            raise UserError(f"kv={policy.name}: TensorRT-LLM builds no INT8 cache for {gpu}; choose kv=fp8")
        if not integers and weights in INTEGER_WEIGHTS:
            raise UserError(f"weights={weights}: TensorRT-LLM builds no integer weights for {gpu}; choose weights=fp8")
        if not fp8 and policy.key.dtype == "fp8_e4m3":
            raise UserError(
                f"kv={policy.name}: TensorRT-LLM has FP8 caches from SM 8.9 on, but this is {gpu}; choose kv=int8_tensor with "
                "backend.target=engine"
            )
        if not fp8 and weights == "fp8":
            raise UserError(f"weights=fp8: TensorRT-LLM has FP8 weights from SM 8.9 on, but this is {gpu}; choose weights=none")


class TrtllmBundle(ServedBundle):
    """`bundle.json` of both targets. `arguments` are the settings under TensorRT-LLM's own dotted keys."""

    target: TargetName
    tensor_parallel_size: int
    max_input_len: int
    evaluated_with: dict[str, Any]
    """LLM arguments of an evaluation. For target=pytorch: the served arguments, without overlapping steps."""
    kv_scales: list[float]
    """The cache's scale per layer, shared by keys and values. For target=engine it is the larger of the two calibrated
    scales; for target=pytorch it is 1.0, because the runtime does not read the checkpoint's scales."""


class TrtllmBackend(InterpreterBackend[TrtllmConfig]):
    """A backend whose bundle is a checkpoint with pinned LLM arguments, or a TensorRT engine (release 1.2)."""

    program = PROGRAM
    record = TrtllmBundle
    checkpoint_folder = "checkpoint"

    def check_inputs(self, job: Job) -> None:
        if not job.builds:
            return
        refuse_other_attention(job.checkpoint, "backend=trtllm was not tested with this")
        target, ranks = self.config.target, self.config.tensor_parallel_size
        refusal = target_refusal(target, job.policy, job.weights, job.checkpoint, ranks)
        if refusal is not None:
            raise UserError(refusal)
        require_target(target, self.interpreter)
        if target == "engine":
            require_gpus(self.interpreter, 1, "building an engine")
            rank_capabilities("engine", self.interpreter, ranks)  # refuses GPUs that differ
        refuse_gpus(target, job.policy, job.weights, self.interpreter.devices[:ranks])
        if job.judges:
            check_judging(target, self.config, job.policy, self.interpreter)

    @property
    def export_ranks(self) -> int:
        return self.config.tensor_parallel_size if self.config.target == "engine" else 1

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        exports = artifacts.exports(policy)
        return Source(exports.path, exports.digest)

    def build_parts(self) -> dict[str, object]:
        target, interpreter = self.config.target, self.interpreter
        capabilities = rank_capabilities(target, interpreter, self.config.tensor_parallel_size)
        return {**super().build_parts(), "compute_capabilities": capabilities}

    def write_served(self, out: Path, info: CheckpointInfo, policy: KVPolicy) -> dict[str, Any]:
        """Write a TensorRT engine, or a checkpoint with pinned LLM arguments, from the exports of stage=quantize."""
        from stages.engines.trtllm.build import write_served

        config, ranks = self.config, self.config.tensor_parallel_size
        capabilities = rank_capabilities(config.target, self.interpreter, ranks)
        return {
            "built_for": BuiltFor(library=PROGRAM.library, version=self.interpreter.release, compute_capabilities=capabilities),
            "target": config.target,
            "tensor_parallel_size": ranks,
            "max_batch": config.max_batch_size,
            "max_input_len": config.max_input_len,
            **write_served(info.path.parent, out, config, policy, self.interpreter),
        }


open_backend = TrtllmBackend
