"""Transfers between host and device: one copy for all inputs of a step, and one wait for its results.

The host's memory is pinned. A copy from pageable memory waits until the driver has staged the data, and every small copy costs
a launch. On a CPU the same code copies between two tensors.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.policies.spec import MAX_FLOAT16

ALIGNMENT = 256
"""Alignment of every tensor in a buffer, in bytes. TensorRT requires it, and kernels load wide words."""

Section = tuple[torch.dtype, tuple[int, ...]]


def allocate_aligned(size: int, device: torch.device) -> Tensor:
    """Allocate `size` bytes (at least one) at an address that is a multiple of ALIGNMENT."""
    memory = torch.empty(max(1, size) + ALIGNMENT, dtype=torch.uint8, device=device)
    first = -memory.data_ptr() % ALIGNMENT
    return memory[first : first + max(1, size)]


def allocate_stacked(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, alignment: int = ALIGNMENT
) -> Tensor:
    """Allocate zeros (count, *shape); each tensor of `shape` begins at a multiple of `alignment` bytes."""
    inner = torch.zeros(shape, dtype=dtype, device="meta").stride()
    stride = -(-math.prod(shape) * dtype.itemsize // alignment) * alignment // dtype.itemsize
    return torch.zeros(count * stride, dtype=dtype, device=device).as_strided((count, *shape), (stride, *inner))


def saturated_product(values: Tensor, factor: Tensor | float) -> Tensor:
    """Return floating-point values times a factor, saturating at float16's range."""
    return (values.float() * factor).clamp(-MAX_FLOAT16, MAX_FLOAT16).to(values.dtype)


class StagedInputs:
    """Host arrays, and device tensors to which `upload` copies them. Their addresses never change."""

    def __init__(self, sections: Mapping[str, Section], device: torch.device) -> None:
        parts, size = {}, 0
        for name, (dtype, shape) in sections.items():
            parts[name] = slice(size, size + math.prod(shape) * dtype.itemsize)
            size = -(-parts[name].stop // ALIGNMENT) * ALIGNMENT
        self._memory = allocate_aligned(size, device).zero_()
        self._pinned = torch.zeros(len(self._memory), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.tensors: dict[str, Tensor] = {}
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        for name, (dtype, shape) in sections.items():
            self.tensors[name] = self._memory[parts[name]].view(dtype).view(shape)
            self.arrays[name] = self._pinned[parts[name]].view(dtype).view(shape).numpy()

    def upload(self) -> None:
        """Copy the arrays to the device on the current stream, without waiting.

        Read the step's results before filling the arrays again: the copy may still be running.
        """
        self._memory.copy_(self._pinned, non_blocking=True)


class StepResults:
    """Pinned host memory for the tensors that a step leaves on the device; floating-point numbers become float32."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        kinds = [torch.float32 if x.is_floating_point() else x.dtype for x in tensors]
        self._pinned = [torch.empty(x.shape, dtype=kind, pin_memory=x.is_cuda) for x, kind in zip(tensors, kinds, strict=True)]

    def read(self) -> list[npt.NDArray[np.generic]]:
        """Wait for the device once and return the tensors' contents, in arrays that the next call overwrites."""
        for pinned, tensor in zip(self._pinned, self._tensors, strict=True):
            pinned.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in self._tensors):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            event.synchronize()
        return [pinned.numpy() for pinned in self._pinned]
