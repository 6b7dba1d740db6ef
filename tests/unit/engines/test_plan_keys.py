"""TensorRT plans on a machine with a GPU: the parts of their keys, and their requirements, checked before any work.

Also plans that were built for another GPU or another release.
"""

from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from helpers.commands.jobs import configured
from helpers.refusals import refused

from pipeline.chain.engine_steps import EngineSteps
from pipeline.chain.inputs import check_inputs
from pipeline.chain.job_run import Run
from pipeline.store.store import Store
from stages.core.artifact import Artifact, Recipe
from stages.core.digest import reachable_modules
from stages.core.errors import MissingRequirement
from stages.engines.bundle import BuiltFor, check_built_for
from stages.engines.tensorrt.backend import RTXBackend, TensorRTBackend
from stages.policies.policy import KVPolicy
from stages.policies.scales import SCALES_FILE


class _Library:
    version = "10.14.1.48"


class _Made(EngineSteps):
    """Chain steps whose quantized scales and ONNX bundles are empty artifacts."""

    def quantized(self, policy: KVPolicy) -> Artifact:  # noqa: ARG002
        return self.store.make(Recipe("quantize", ("stages.policies.policy",), {}, {}), lambda out: (out / SCALES_FILE).touch())

    def bundle(self, policy: KVPolicy, config: Any = None) -> Artifact:
        if config is None:
            return super().bundle(policy)
        return self.store.make(Recipe("build", ("stages.policies.policy",), {}, {}), lambda _: None)


GPU = {"name": "NVIDIA H100", "compute_cap": "9.0", "driver_version": "580.1"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with TensorRT and a GPU. TensorRT's distribution is named tensorrt_cu13, not tensorrt."""
    monkeypatch.setattr("stages.engines.tensorrt.backend.load", lambda _: _Library)
    monkeypatch.setattr("stages.engines.tensorrt.backend.gpus", lambda: [GPU])
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: GPU["name"])
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
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
    parts: Any = Run(configured(tmp_path, "backend=tensorrt")).verdict_steps.recipe("evaluate", "joining", {}).parts
    assert parts["config"]["versions"] == {"tensorrt": "10.14.1.48"}
    assert {"torch", "numpy"} <= set(parts["libraries"])
    assert "triton" not in parts["libraries"]
    assert not [name for name in reachable_modules("stages.engines.tensorrt.engine") if name.startswith("plugins")]


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


def test_the_key_of_plans_for_rtx_does_not_depend_on_the_plugin() -> None:
    assert {"plugins.kv_attention.kernels.decode", "stages.engines.tensorrt.build"} <= set(
        reachable_modules(TensorRTBackend.build_module)
    )
    assert not [name for name in reachable_modules(RTXBackend.build_module) if name.startswith("plugins")]


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
