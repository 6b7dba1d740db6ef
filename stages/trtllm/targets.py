"""What TensorRT-LLM's two targets can hold and need: everything that can be refused before any work."""

from dataclasses import dataclass
from typing import Literal

from pipeline.backends import TrtllmBackend
from pipeline.checkpoint import CheckpointInfo, inspect_checkpoint
from pipeline.config import Config
from pipeline.errors import MissingRequirement, UserError
from pipeline.kv import KVPolicy
from pipeline.weights import WeightsFormat
from stages.quantize.validate import TENSORRT_LLM_KV, UNIFIED_HF_KV, why_not, why_not_tensorrt_llm
from stages.trtllm.interpreter import HOW, Interpreter, probe, require_gpus

TargetName = Literal["engine", "pytorch"]
MAKES_ENGINE = ("build", "evaluate", "all")
JUDGES = ("evaluate", "all")
INT8_CACHE_UNTIL_SM = 100
"""TensorRT-LLM 1.2 refuses INT8 caches on SM 10.0 to 11.9 (tensorrt_llm/builder.py)."""
INT8_CACHE_AGAIN_SM = 120


@dataclass(frozen=True)
class Target:
    """One way to deploy with TensorRT-LLM."""

    export: str
    """The folder of the quantized checkpoint that it is made from."""
    releases: str
    caches: tuple[str, ...]
    """Algorithms of the cache, besides none; one scale a layer."""
    weights: tuple[WeightsFormat, ...]
    sharded_weights: tuple[WeightsFormat, ...]
    """Weights that are split over several GPUs."""
    choices: str
    """Policies that fit, for a person."""


TARGETS: dict[TargetName, Target] = {
    "engine": Target(
        export="tensorrt_llm",
        releases="1.2 (1.2.1 is the last that builds engines)",
        caches=TENSORRT_LLM_KV,
        weights=("none", "fp8", "int8_sq", "int4_awq"),
        sharded_weights=("none", "fp8"),
        choices="kv=fp16, fp8 or int8_tensor",
    ),
    "pytorch": Target(
        export="unified_hf",
        releases="1.3 or later",
        caches=UNIFIED_HF_KV,
        weights=("none", "fp8", "int4_awq"),
        sharded_weights=("none", "fp8", "int4_awq"),
        choices="kv=fp16 or fp8",
    ),
}


def check_inputs(config: Config) -> None:
    """Refuse what cannot be built, before anything is: UserError names the key, MissingRequirement what is not here."""
    backend = config.backend
    assert isinstance(backend, TrtllmBackend)
    if config.stage not in MAKES_ENGINE:
        return
    info = inspect_checkpoint(config.model.directory)
    asked: tuple[TargetName, ...] = ("engine", "pytorch") if backend.target == "auto" else (backend.target,)
    refusals = [refuse(name, config.kv, config.weights.format, info, backend.tensor_parallel_size) for name in asked]
    if all(refusals):  # whatever the interpreter turns out to be
        raise UserError(str(refusals[0]))
    here = probe(backend.python)
    name = resolve(backend.target, here)
    refusal = refuse(name, config.kv, config.weights.format, info, backend.tensor_parallel_size)
    if refusal is not None:
        raise UserError(refusal)
    if name == "engine":
        require_gpus(here, 1, "building an engine")
        refuse_int8(config.kv, here)
    if config.stage in JUDGES:
        check_judging(name, config, here)


def found(config: TrtllmBackend) -> dict[str, object]:
    """What the interpreter decides of a build, so that its key covers it."""
    here = probe(config.python)
    name = resolve(config.target, here)
    capabilities = here.compute_capabilities if name == "engine" else []
    return {"target": name, "release": here.release, "compute_capabilities": capabilities}


def check_judging(name: TargetName, config: Config, here: Interpreter) -> None:
    """What evaluating needs beyond building."""
    backend = config.backend
    assert isinstance(backend, TrtllmBackend)
    require_gpus(here, backend.tensor_parallel_size, "running an engine")
    if not config.kv.quantized:
        raise UserError(
            f"kv={config.kv.name}: its cache has no scale, so backend=trtllm has no canary to prove that an evaluation reads "
            f"it; judge kv=fp8, whose baseline it is, or build it with stage=build"
        )
    if name == "pytorch" and backend.tensor_parallel_size > 1:
        raise UserError(
            f"backend.tensor_parallel_size={backend.tensor_parallel_size}: target=pytorch is evaluated in one process, where "
            "the canary reaches its layers: evaluate with 1, build with stage=build"
        )


def resolve(asked: str, installed: Interpreter) -> TargetName:
    """The target for the installed release; MissingRequirement when the release does not have the one that is asked for."""
    here: TargetName | None = None
    if installed.number == (1, 2):
        here = "engine"
    elif installed.number >= (1, 3):
        here = "pytorch"
    if here is None or asked not in ("auto", here):
        wanted = TARGETS[asked].releases if asked in TARGETS else "1.2 or later"
        raise MissingRequirement(
            f"backend.python={installed.python}: has TensorRT-LLM {installed.release}, backend.target={asked} needs {wanted}; "
            f"{HOW}"
        )
    return here


def refuse(name: TargetName, policy: KVPolicy, weights: WeightsFormat, info: CheckpointInfo, ranks: int) -> str | None:
    """Why the target cannot hold this: key, value, fix; None when it can."""
    target = TARGETS[name]
    reason = why_not(policy, target.caches)
    if reason is not None:
        return (
            f"kv={policy.name}: backend=trtllm, target {name}, cannot hold it ({reason}); choose {target.choices}, or "
            "backend=onnxruntime, which runs every policy"
        )
    if weights not in target.weights:
        return f"weights={weights}: backend.target={name} takes {', '.join(target.weights)}; choose one of them"
    reason = why_not_tensorrt_llm(info) if name == "engine" else None
    if reason is not None:
        return f"model.path={info.path}: {reason}; use backend.target=pytorch with TensorRT-LLM 1.3"
    if ranks > 1 and weights not in target.sharded_weights:
        return (
            f"backend.tensor_parallel_size={ranks}: weights={weights} are not split over GPUs here; use 1, or weights="
            f"{' or '.join(target.sharded_weights)}"
        )
    for what, count in (("KV heads", info.shape.kv_heads), ("tokens in the vocabulary", info.vocab_size)):
        if count % ranks:
            return f"backend.tensor_parallel_size={ranks}: does not divide the model's {count} {what}; use a divisor"
    return None


def refuse_int8(policy: KVPolicy, here: Interpreter) -> None:
    """UserError for an INT8 cache on a GPU for which TensorRT-LLM does not build one."""
    for name, capability, _ in here.gpus:
        sm = int(capability.replace(".", ""))
        if policy.key.dtype == "int8" and INT8_CACHE_UNTIL_SM <= sm < INT8_CACHE_AGAIN_SM:
            raise UserError(f"kv={policy.name}: TensorRT-LLM builds no INT8 cache for {name}, SM {capability}; choose kv=fp8")
