"""The part of torch that the fakes and the workers need. The real torch takes seconds to import."""

import json
import os
from types import SimpleNamespace
from typing import Any

_GPUS: list[str] = json.loads(os.environ["FAKE_GPUS"])
"""Compute capabilities, in CUDA's order."""
_ALL = ",".join(map(str, range(len(_GPUS))))
_SHOWN = [int(number) for number in os.environ.get("CUDA_VISIBLE_DEVICES", _ALL).split(",") if number]
cuda = SimpleNamespace(
    device_count=lambda: len(_SHOWN),
    get_device_name=lambda device: f"Fake H{_SHOWN[device]}",
    get_device_capability=lambda device: tuple(map(int, _GPUS[_SHOWN[device]].split("."))),
)


def __getattr__(name: str) -> Any:
    """Define `Tensor` on first use: only computing needs numpy."""
    if name != "Tensor":
        raise AttributeError(name)
    import numpy as np

    class Tensor(np.ndarray):  # type: ignore[type-arg]
        """The part of torch.Tensor that results and processors need."""

        def detach(self) -> "Tensor":
            return self

        cpu = detach

        def float(self) -> "Tensor":
            return self.astype(np.float32)

        def fill_(self, value: Any) -> None:
            self.fill(value)

        def numpy(self) -> Any:
            return np.asarray(self)

    globals()[name] = Tensor
    return Tensor
