"""Counts what a step moves between host and device, on a CPU, where every such move is the same call of torch as on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stages.engines.staging import StagedInputs, StepResults

WAITS = ("cpu", "numpy", "item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")
"""What waits for the device, were the tensor there."""
UPLOADS = ("tensor", "as_tensor")
"""What makes a tensor of the host's numbers, from memory that is not pinned; torch.from_numpy is counted apart."""


class Transfers(TorchFunctionMode):
    """Collects the names of torch's functions that move numbers between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in (*WAITS, *UPLOADS):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Count uploads and reads by stages.engines.staging, and list all other transfers."""
    transfers = Transfers()
    counts: dict[str, Any] = {"uploads": 0, "reads": 0, "transfers": transfers.seen}
    allocate, upload, read, from_numpy = StagedInputs.__init__, StagedInputs.upload, StepResults.read, torch.from_numpy

    def counted_allocate(self: StagedInputs, *args: Any) -> None:
        with torch._C.DisableTorchFunction():
            allocate(self, *args)

    def counted_upload(self: StagedInputs, last: str | None = None) -> None:
        counts["uploads"] += 1
        upload(self, last)

    def counted_read(self: StepResults) -> Any:
        counts["reads"] += 1
        with torch._C.DisableTorchFunction():
            return read(self)

    def counted_from_numpy(array: Any) -> Tensor:
        transfers.seen.append("from_numpy")
        return from_numpy(array)

    with monkeypatch.context() as patch, transfers:
        patch.setattr(StagedInputs, "__init__", counted_allocate)
        patch.setattr(StagedInputs, "upload", counted_upload)
        patch.setattr(StepResults, "read", counted_read)
        patch.setattr(torch, "from_numpy", counted_from_numpy)
        yield counts
