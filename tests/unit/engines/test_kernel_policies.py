"""Policies that the CUDA kernels support, and early refusals of policies, models and machines."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints.configs import MISTRAL, make
from helpers.engines.gpu import pretend_gpu
from helpers.policies.shipped import SHIPPED
from helpers.refusals import refused

from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import plan
from stages.checkpoints.description import inspect_checkpoint
from stages.core.errors import MissingRequirement, UserError
from stages.engines.backend import ROUNDING, Job, open_backend
from stages.engines.gpu import gpu_identity, resolve_device
from stages.engines.paged.kernel_layout import check_kernels
from stages.engines.torch.backend import FLOAT16_WEIGHTS
from stages.engines.torch.config import TorchConfig
from stages.policies.formats import Format
from stages.policies.policy import Eviction, KVShape, LayerOverride

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=128)
NAMES = {"bf16", "fp16", "fp8", "fp8_head", "fp8_token", "fp8_uncalibrated", "fp8k_int4v", "fp8k_nvfp4v", "int8", "int8_tensor"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_pool_has_as_many_bytes_as_the_policy_computes(name: str) -> None:
    policy = SHIPPED[name]
    layouts = check_kernels(policy, SHAPE, 8)
    assert sum(layout.token_bytes for layout in layouts) == policy.bytes_per_token(SHAPE)
    assert len(set(layouts)) == 1
    override = LayerOverride(layers=(1,), key=SHIPPED["int8"].key)
    first, second, third = check_kernels(policy.model_copy(update={"overrides": (override,)}), SHAPE, 8)
    assert (first, third, second.key.dtype) == (layouts[0], layouts[0], "int8")


FP8 = SHIPPED["fp8"].key
PER_GROUP: dict[str, Any] = {"granularity": "per_group", "scale": "dynamic"}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"key": Format(dtype="int4", group_size=64, **PER_GROUP)}, "kv.key.dtype=int4"),
        ({"value": Format(dtype="fp8_e5m2", granularity="per_tensor", scale="uncalibrated")}, "kv.value.dtype=fp8_e5m2"),
        ({"value": Format(dtype="int8", group_size=64, **PER_GROUP)}, "kv.value.granularity=per_group"),
        ({"value": Format(dtype="int4", group_size=16, **PER_GROUP)}, "kv.value.group_size=16"),
        ({"value": Format(dtype="int4", granularity="per_tensor", scale="calibrated")}, "kv.value.granularity=per_tensor"),
        ({"key": FP8.model_copy(update={"rotation": "hadamard"})}, "kv.key.rotation=hadamard"),
        (
            {"value": Format(dtype="int8", granularity="per_token", scale="dynamic", symmetric=False)},
            "kv.value.symmetric=false",
        ),
        ({"overrides": (LayerOverride(layers=(1,), key=SHIPPED["int4"].key),)}, "kv.overrides.0.key.dtype=int4"),
        ({"window": SHIPPED["fp8k_int4v_aged"].window}, "kv.window.tokens=8192"),
        ({"eviction": SHIPPED["fp8_streaming"].eviction}, "kv.eviction.window_tokens=4096"),
    ],
)
def test_a_refused_policy_is_named(change: dict[str, Any], key: str) -> None:
    with refused(UserError, f"{key}: the CUDA kernels "):
        check_kernels(SHIPPED["fp8"].model_copy(update=change), SHAPE, 8)


def test_auto_is_the_gpu_if_present_and_missing_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    assert [resolve_device(device) for device in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    assert gpu_identity() == {"device": "cuda", "gpu": "NVIDIA H200", "compute_capability": "9.0"}
    with monkeypatch.context() as patch:
        patch.setattr("stages.engines.gpu.find_spec", lambda _: None)
        with refused(MissingRequirement, "backend.device=auto needs triton, which is not installed here"):
            resolve_device("auto")
    pretend_gpu(monkeypatch, capability=(7, 5))
    with refused(MissingRequirement, "backend.device=auto needs a GPU of compute capability 8.0 or newer, NVIDIA H200 has 7.5"):
        resolve_device("auto")
    pretend_gpu(monkeypatch, present=False)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    missing = f"backend.device=cuda: torch {torch.__version__} finds no NVIDIA GPU here; set backend.device=cpu. On a machine"
    with refused(MissingRequirement, missing):
        resolve_device("cuda")
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    with refused(MissingRequirement, missing):
        resolve_device("cuda")


def check_jobs(*overrides: str) -> None:
    for job in plan(["backend=torch", *overrides], multirun=False).jobs:
        check_inputs(job)


def test_a_job_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, present=False)
    with pytest.raises(UserError, match=r"kv\.key\.dtype=int4"):
        check_jobs("backend.device=cuda", "kv=int4_g64")
    with pytest.raises(MissingRequirement, match=r"backend\.device=cuda"):
        check_jobs("backend.device=cuda", "kv=fp8")
    check_jobs("backend.device=cuda", "kv=fp8", "stage=build")  # a bundle can be built without a GPU
    check_jobs("backend.device=auto", "kv=int4_g64")
    with pytest.raises(MissingRequirement, match=r"^backend\.compute_dtype=bfloat16: .*; set backend\.compute_dtype=float32$"):
        check_jobs("backend.compute_dtype=bfloat16")
    check_jobs("backend=tensorrt_rtx", "backend.compute_dtype=bfloat16", "stage=build")


def test_the_compute_type_of_a_gpu_is_part_of_an_evaluations_key(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    for dtype, rounding in (("float32", FLOAT16_WEIGHTS), ("bfloat16", ROUNDING["bfloat16"])):
        config = TorchConfig.model_validate({"name": "torch", "device": "cuda", "threads": 1, "compute_dtype": dtype})
        backend = open_backend(config)
        assert (backend.rounding, backend.run_parts()["compute_dtype"]) == (rounding, dtype)
    assert "compute_dtype" not in open_backend(TorchConfig(name="torch", device="cpu", threads=1)).run_parts()


SLIDES = "config.json: 3 of 3 layers attend only to their last 32 tokens: "


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt_rtx", "trtllm", "vllm", "sglang", "torch backend.device=cuda"])
def test_unsupported_windows_and_evictions_are_refused(backend: str, tmp_path: Path) -> None:
    policy = "fp8_uncalibrated" if backend in ("vllm", "sglang") else "fp8"
    (config,) = plan([f"kv={policy}", *f"backend={backend}".split()], multirun=False).jobs
    window = "model.path: sliding_window=32: with the CUDA kernels" if backend.startswith("torch") else SLIDES
    models = [inspect_checkpoint(make(tmp_path, **MISTRAL, sliding_window=size, hidden_size=256)) for size in (32, None)]
    with pytest.raises(UserError, match=re.escape(window)):
        open_backend(config.backend).check_inputs(Job(config.kv, "none", models[0], judges=True))
    if backend == "trtllm" or backend.startswith("torch"):
        return
    for heavy, reached in ((0, ["backend=onnxruntime"]), (64, ["backend=torch", "backend.device=cpu"])):
        eviction = Eviction(window_tokens=128, heavy_tokens=heavy)
        job = Job(config.kv.model_copy(update={"eviction": eviction}), "none", models[1], judges=True)
        with pytest.raises(UserError, match=f"or {' '.join(reached)}, which"):
            open_backend(config.backend).check_inputs(job)
        (held,) = plan([f"kv={policy}", *reached], multirun=False).jobs
        open_backend(held.backend).check_inputs(job)
