"""TensorRT's versions, the shapes and sizes of plans, and policies that TensorRT cannot build."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from helpers.policies.shipped import SHIPPED

from stages.core.errors import MissingRequirement, UserError
from stages.engines.tensorrt import library as library_module
from stages.engines.tensorrt.backend import cuda_gpu, refuse_caches
from stages.engines.tensorrt.library import load
from stages.engines.tensorrt.shapes import MAX_ELEMENTS, PlanLimits, check_extents
from stages.policies.formats import Format
from stages.policies.policy import FP16_POLICY, KVPolicy, KVShape, LayerOverride, Window

INT8 = Format(dtype="int8", granularity="per_token", scale="dynamic")
FP16 = Format(dtype="fp16")
LAYERED = KVPolicy(
    name="layered",
    key=INT8,
    value=INT8,
    window=Window(tokens=128, key=FP16),
    overrides=(LayerOverride(layers=(2,), value=FP16),),
)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    load.cache_clear()


@pytest.mark.parametrize(
    ("name", "version", "range_text"),
    [
        ("tensorrt", "10.9.0.34", r"TensorRT >= 10\.14 and < 12\.0"),
        ("tensorrt", "12.0.0.1", r"TensorRT >= 10\.14 and < 12\.0"),
        ("tensorrt_rtx", "1.8.0.1", r"TensorRT for RTX >= 1\.7 and < 1\.8"),
    ],
)
def test_an_unknown_release_is_refused_with_both_versions(
    name: library_module.Name, version: str, range_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=version, ILogger=object))
    monkeypatch.setitem(sys.modules, f"{name}.plugin", SimpleNamespace())
    with pytest.raises(MissingRequirement, match=rf"^backend={name} needs {range_text}, found {version}: pip install"):
        load(name)


@pytest.mark.parametrize("tokens", [64, 65, 1000, 4096])
def test_no_sequence_has_more_window_pages_than_its_plan(tokens: int) -> None:
    limits = PlanLimits(LAYERED, max_batch=3, max_tokens=4096)
    assert max(LAYERED.window_pages(length) for length in range(tokens + 1)) <= limits.sequence_window_pages
    assert limits.ranges("decode")["Y"].largest == 3
    assert limits.fixed == {"N": 192, "M": 3, "NW": 9}
    assert [limits.ranges(mode)["B"].largest for mode in ("prefill", "decode")] == [1, 3]


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        (SHIPPED["fp8_e5m2"], "kv.key"),
        (LAYERED.model_copy(update={"overrides": (LayerOverride(layers=(1,), value=SHIPPED["fp8_e5m2"].value),)}),
         "kv.overrides.0.value"),
    ],
    ids=["keys", "an_overridden_layer"],
)  # fmt: skip
def test_a_type_that_tensorrt_lacks_is_refused_before_any_work(policy: KVPolicy, key: str) -> None:
    with pytest.raises(UserError, match=rf"^{key}\.dtype=fp8_e5m2: TensorRT has no type FLOAT8E5M2; .* backend=onnxruntime"):
        refuse_caches(SimpleNamespace(policy=policy))  # type: ignore[arg-type]


GPUS = [{"name": name, "compute_cap": "9.0", "driver_version": "580.1"} for name in ("NVIDIA H100", "NVIDIA L40S")]


def test_plans_are_built_for_the_gpu_that_cuda_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.engines.tensorrt.backend.gpus", lambda: GPUS)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA L40S")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 9))
    assert cuda_gpu() == {"name": "NVIDIA L40S", "compute_cap": "8.9", "driver_version": "580.1"}


LLAMA = KVShape(layers=2, kv_heads=8, head_dim=128)
Q_HEADS = 32


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(64, 32_704), (63, 32_768), (1, 64_448), (64, 32_768)])
def test_a_pool_must_have_fewer_than_2_31_elements(max_batch: int, max_tokens: int) -> None:
    """The limit is reached by 64 sequences of 32,768 tokens with 8 heads of 128 channels."""
    too_many = max_batch * max_tokens * 8 * 128 > MAX_ELEMENTS
    expected = r"^backend\.max_batch=64, backend\.max_tokens=32768: .* 2,147,483,648 elements, .*; lower one"
    with pytest.raises(UserError, match=expected) if too_many else nullcontext():
        check_extents(FP16_POLICY, LLAMA, Q_HEADS, range(2), max_batch=max_batch, max_tokens=max_tokens)
