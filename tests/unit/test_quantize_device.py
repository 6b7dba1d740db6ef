"""quantize.device: what it means on this machine."""

import pytest
import torch

from pipeline.core.errors import MissingRequirement
from stages.quantize.run import resolve_device


@pytest.mark.parametrize(("device", "found", "means"), [("auto", False, "cpu"), ("cpu", True, "cpu"), ("auto", True, "cuda")])
def test_auto_is_a_gpu_where_there_is_one(device: str, found: bool, means: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    assert resolve_device(device).type == means


def test_a_gpu_that_is_missing_is_said_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingRequirement, match=r"no NVIDIA GPU here; set quantize\.device=auto"):
        resolve_device("cuda")
