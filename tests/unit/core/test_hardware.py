"""Descriptions of a machine's GPUs, and engines built for other GPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.refusals import refused

from stages.core.errors import MissingRequirement
from stages.core.hardware import gpus, hardware
from stages.engines.bundle import BuiltFor, check_built_for

BUILT = BuiltFor(library="TensorRT", version="10.14.1.48", compute_capabilities=["8.9", "9.0"])


@pytest.fixture(autouse=True)
def _asked_afresh() -> Iterator[None]:
    for function in (gpus, hardware):
        function.cache_clear()
    yield
    for function in (gpus, hardware):
        function.cache_clear()


def install_nvidia_smi(folder: Path, script: str, patch: pytest.MonkeyPatch) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    patch.setenv("PATH", str(folder))


def test_a_gpu_is_named_with_its_compute_capability_and_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == [], "a machine without a driver"
    gpus.cache_clear()
    # the output of `nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader` with two GPUs
    install_nvidia_smi(tmp_path, "echo 'NVIDIA H100 80GB HBM3, 9.0, 550.54.15\nNVIDIA L4, 8.9, 550.54.15'", monkeypatch)
    assert gpus() == [
        {"name": "NVIDIA H100 80GB HBM3", "compute_cap": "9.0", "driver_version": "550.54.15"},
        {"name": "NVIDIA L4", "compute_cap": "8.9", "driver_version": "550.54.15"},
    ]
    assert hardware()["gpus"] == gpus()


def test_a_driver_that_does_not_answer_is_not_taken_for_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", monkeypatch)
    with pytest.raises(MissingRequirement, match="does not answer: Failed to initialize NVML"):
        gpus()
    assert "Failed to initialize NVML" in str(hardware()["gpus"]), "an engine on the CPU does not need the GPU"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"version": "10.15.0.1", "compute_capabilities": ["8.9"]}, "TensorRT 10.15.0.1 and SM 8.9"),
        ({"compute_capabilities": []}, "TensorRT 10.14.1.48 and no GPU"),
        ({"library": "TensorRT for RTX", "compute_capabilities": ["8.9"]}, "TensorRT for RTX 10.14.1.48 and SM 8.9"),
    ],
)
def test_an_engine_for_another_gpu_or_version_is_refused(found: dict[str, object], said: str) -> None:
    built = "engine: this engine was built for TensorRT 10.14.1.48 and SM 8.9, 9.0"
    with refused(MissingRequirement, f"{built}, this machine has {said}: build it here"):
        check_built_for(Path("engine"), BUILT, BUILT.model_copy(update=found))
