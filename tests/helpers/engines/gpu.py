"""A machine that torch sees with, or without, an NVIDIA GPU."""

import pytest
import torch


def pretend_gpu(
    patch: pytest.MonkeyPatch, *, present: bool = True, name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0)
) -> None:
    """Let torch report one NVIDIA GPU, or none."""
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.cuda, "is_available", lambda: present)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
