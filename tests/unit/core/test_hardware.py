"""Descriptions of a machine's GPUs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.core.errors import MissingRequirement
from stages.core.hardware import gpus, hardware


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
    assert gpus() == [], "no nvidia-smi on PATH"
    gpus.cache_clear()
    # the output of `nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader` with two GPUs
    install_nvidia_smi(tmp_path, "echo 'NVIDIA H100 80GB HBM3, 9.0, 550.54.15\nNVIDIA L4, 8.9, 550.54.15'", monkeypatch)
    assert gpus() == [
        {"name": "NVIDIA H100 80GB HBM3", "compute_cap": "9.0", "driver_version": "550.54.15"},
        {"name": "NVIDIA L4", "compute_cap": "8.9", "driver_version": "550.54.15"},
    ]
    assert hardware()["gpus"] == gpus()
    gpus.cache_clear()
    install_nvidia_smi(tmp_path, "echo 'A100, 80 GB, 8.0, 550.54.15'", monkeypatch)
    assert gpus() == [{"name": "A100, 80 GB", "compute_cap": "8.0", "driver_version": "550.54.15"}]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'No devices were found'", "does not describe a GPU: No devices were found"),
        ("echo 'Failed to initialize NVML: version mismatch'; exit 18", "does not answer: Failed to initialize NVML"),
        ("exit 18", "does not answer: .*exit status 18"),
    ],
)
def test_an_answer_without_a_gpu_is_not_taken_for_no_gpu(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvidia_smi(tmp_path, script, monkeypatch)
    with pytest.raises(MissingRequirement, match=reason):
        gpus()
    assert re.search(reason, str(hardware()["gpus"])), "hardware() does not raise: CPU engines need no GPU"
