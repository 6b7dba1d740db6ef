"""TensorRT plans: their keys, their requirements on a machine, versions, sizes, and policies that TensorRT cannot build."""

import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.commands.jobs import configured
from helpers.engines.gpu import pretend_gpu
from helpers.policies.shipped import SHIPPED
from helpers.refusals import refused

from pipeline.chain.engine_steps import EngineSteps
from pipeline.chain.inputs import check_inputs
from pipeline.chain.job import Run
from pipeline.store.store import Store
from stages.core.artifact import Artifact, Recipe
from stages.core.errors import MissingRequirement, UserError
from stages.engines.bundle import BuiltFor, check_built_for
from stages.engines.tensorrt import library as library_module
from stages.engines.tensorrt.backend import refuse_caches
from stages.engines.tensorrt.library import load
from stages.engines.tensorrt.shapes import MAX_ELEMENTS, PlanLimits, check_extents
from stages.policies.formats import Format
from stages.policies.policy import FP16_POLICY, KVPolicy, KVShape, LayerOverride, Window
from stages.policies.scales import SCALES_FILE


class _Library:
    version = "10.14.1.48"


class _Made(EngineSteps):
    """Chain steps whose quantized scales and ONNX bundles are empty artifacts."""

    def quantized(self, policy: KVPolicy) -> Artifact:  # noqa: ARG002
        return self.store.make(Recipe("quantize", {}, {}), lambda out: (out / SCALES_FILE).touch())

    def bundle(self, policy: KVPolicy, config: Any = None) -> Artifact:
        if config is None:
            return super().bundle(policy)
        return self.store.make(Recipe("build", {}, {}), lambda _: None)


GPU = {"name": "NVIDIA L40S", "compute_cap": "8.9", "driver_version": "580.1"}
"""The GPU that CUDA uses, and that builds and runs the plans."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with TensorRT and two GPUs. TensorRT's distribution is named tensorrt_cu13, not tensorrt."""
    monkeypatch.setattr("stages.engines.tensorrt.backend.load", lambda _: _Library)
    other = {"name": "NVIDIA H100", "compute_cap": "9.0"}
    monkeypatch.setattr("stages.engines.tensorrt.backend.gpus", lambda: [{**other, "driver_version": "580.1"}, GPU])
    pretend_gpu(monkeypatch, name=GPU["name"], capability=(8, 9))
    return monkeypatch


@pytest.mark.parametrize(
    ("backend", "versions"),
    [
        ("tensorrt", {"tensorrt": "10.14.1.48", "triton": metadata.version("triton")}),
        ("tensorrt_rtx", {"tensorrt_rtx": "10.14.1.48"}),
    ],
)
def test_plan_keys_have_the_imported_librarys_version(
    backend: str, versions: dict[str, str], tmp_path: Path, machine: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, object] = {}

    def build(reference: Path, out: Path, **options: object) -> None:  # noqa: ARG001
        arguments.update(options)

    machine.setattr("stages.engines.tensorrt.build.build_bundle", build)
    config = configured(tmp_path, f"backend={backend}")
    chain = _Made(config, Store(tmp_path))
    artifact = chain.bundle(config.kv)
    parts: Any = artifact.parts
    assert parts["config"]["versions"] == versions
    assert parts["config"].get("gpu") == (GPU if backend == "tensorrt" else None)
    assert set(parts["libraries"]) == {"onnx", "numpy"}
    assert arguments.keys() - {"adapt"} == {*parts["config"], "policy", "scales", "progress"} - {"kv", "versions"}
    machine.setattr(_Library, "version", "10.15")
    assert _Made(config, Store(tmp_path)).bundle(config.kv).key != artifact.key


def test_running_plans_needs_torch_but_no_build_libraries(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    machine.setattr("stages.engines.tensorrt.backend.triton_version", lambda: None)
    parts: Any = Run(configured(tmp_path, "backend=tensorrt")).verdict_steps.recipe("evaluate", {}).parts
    assert parts["config"]["versions"] == {"tensorrt": "10.14.1.48"}
    assert {"torch", "numpy"} <= set(parts["libraries"])
    assert "triton" not in parts["libraries"]


@pytest.mark.parametrize(
    ("lacking", "stage", "kv", "message"),
    [
        ("driver", "build", "fp8k_int4v", "^backend=tensorrt needs the driver's version .*: install nvidia-smi"),
        ("torch", "all", "fp8k_int4v", "^backend=tensorrt: .*; use backend=tensorrt_rtx, .* a CUDA build of torch"),
        ("triton", "build", "fp8k_int4v", r"needs Triton .*triton>=3"),
        ("triton", "evaluate", "int8_asym", "needs Triton"),  # the kernels support the baseline's keys
        ("triton", "build", "int8_asym", None),
        ("torch", "quantize", "fp8k_int4v", None),
        ("nothing", "all", "fp8k_int4v", None),
    ],
)
def test_missing_requirements_of_plans_are_named_before_any_work(
    lacking: str, stage: str, kv: str, message: str | None, tmp_path: Path, machine: pytest.MonkeyPatch
) -> None:
    present = {"driver": ("stages.engines.tensorrt.backend.gpus", list), "torch": ("torch.cuda.is_available", lambda: False),
             "triton": ("stages.engines.tensorrt.backend.triton_version", lambda: None)}  # fmt: skip
    if lacking in present:
        machine.setattr(*present[lacking])
    config = configured(tmp_path, "backend=tensorrt", f"stage={stage}", f"kv={kv}")
    with pytest.raises(MissingRequirement, match=message) if message is not None else nullcontext():
        check_inputs(config)


BUILT = BuiltFor(library="TensorRT", version="10.14.1.48", compute_capabilities=["8.9", "9.0"])


@pytest.mark.parametrize(
    ("machine", "exactly", "message"),
    [
        ({"version": "10.15.0.1", "compute_capabilities": ["8.9"]}, False, "TensorRT 10.15.0.1 and SM 8.9"),
        ({"compute_capabilities": []}, False, "TensorRT 10.14.1.48 and no GPU"),
        ({"compute_capabilities": ["9.0", "12.0"]}, False, "TensorRT 10.14.1.48 and SM 9.0, 12.0"),
        ({"library": "TensorRT for RTX", "compute_capabilities": ["8.9"]}, False, "TensorRT for RTX 10.14.1.48 and SM 8.9"),
        ({"compute_capabilities": ["8.9"]}, True, "TensorRT 10.14.1.48 and SM 8.9"),
        ({"compute_capabilities": ["8.9"]}, False, None),
        ({"compute_capabilities": ["9.0", "8.9"]}, True, None),
    ],
)
def test_an_engine_for_another_gpu_or_version_is_refused(
    machine: dict[str, object], exactly: bool, message: str | None
) -> None:
    built = "engine: this engine was built for TensorRT 10.14.1.48 and SM 8.9, 9.0"
    refusal = refused(MissingRequirement, f"{built}, but this machine has {message}: build it here")
    with nullcontext() if message is None else refusal:
        check_built_for(Path("engine"), BUILT, BUILT.model_copy(update=machine), exactly=exactly)


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


LLAMA = KVShape(layers=2, kv_heads=8, head_dim=128)
Q_HEADS = 32


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(64, 32_704), (63, 32_768), (1, 64_448), (64, 32_768)])
def test_a_pool_must_have_fewer_than_2_31_elements(max_batch: int, max_tokens: int) -> None:
    """The limit is reached by 64 sequences of 32,768 tokens with 8 heads of 128 channels."""
    too_many = max_batch * max_tokens * 8 * 128 > MAX_ELEMENTS
    expected = r"^backend\.max_batch=64, backend\.max_tokens=32768: .* 2,147,483,648 elements, .*; lower one"
    with pytest.raises(UserError, match=expected) if too_many else nullcontext():
        check_extents(FP16_POLICY, LLAMA, Q_HEADS, range(2), max_batch=max_batch, max_tokens=max_tokens)
