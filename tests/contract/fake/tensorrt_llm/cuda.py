"""torch.cuda for test interpreters (imported by `torch.py` next to `python`): the GPUs in CUDA_VISIBLE_DEVICES."""

import json
import os

_GPUS: list[str] = json.loads(os.environ["FAKE_TRTLLM_GPUS"])
"""Compute capabilities, in CUDA's order."""
_ALL = ",".join(map(str, range(len(_GPUS))))
_SHOWN = [int(number) for number in os.environ.get("CUDA_VISIBLE_DEVICES", _ALL).split(",") if number]


def device_count() -> int:
    return len(_SHOWN)


def get_device_name(device: int) -> str:
    return f"Fake H{_SHOWN[device]}"


def get_device_capability(device: int) -> tuple[int, int]:
    major, minor = _GPUS[_SHOWN[device]].split(".")
    return int(major), int(minor)
