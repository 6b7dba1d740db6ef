"""The paged pool on a GPU: torch tensors, stacked over the layers with equal formats, so that one launch covers these layers.

Shapes: l layers of a group, N pages or exact buffers, H KV heads, W elements of a token.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.engines.paged.pool import PagedPool
from stages.engines.paged.sequences import PageAllocator
from stages.engines.staging import ALIGNMENT, allocate_stacked, saturated_product
from stages.policies.policy import KVPolicy, KVShape


@dataclass(frozen=True)
class LayerGroup:
    """Layers with equal formats."""

    layers: list[int]
    tensors: dict[str, Tensor]
    """Stacked arrays (l, N, H, 64 or exact slots, W), by name without the layer: `key_pool`, `value_exact`."""


class TorchPool(PagedPool):
    alignment: ClassVar[int] = ALIGNMENT
    """Alignment in bytes of each layer's arrays."""

    def __init__(self, policy: KVPolicy, shape: KVShape, max_pages: int, device: torch.device) -> None:
        self.device = device
        by_formats: dict[Any, list[int]] = {}
        for layer in range(shape.layers):
            by_formats.setdefault(tuple(policy.sides(layer).items()), []).append(layer)
        self.groups = [LayerGroup(layers, {}) for layers in by_formats.values()]
        super().__init__(policy, shape, max_pages)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return cast(dict[str, Tensor], self.arrays)

    def scale_array(self, name: str, factor: float) -> None:
        array = self.tensors[name]
        array.copy_(saturated_product(array, factor))

    def constant(self, values: npt.NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self.device, copy=True)

    def on_host(self, constant: Tensor) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = constant.cpu().numpy().copy()
        return values

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        # The types have the same names in numpy and torch, because FP8 codes are stored as uint8.
        return torch.zeros(shape, dtype=getattr(torch, np.dtype(dtype).name), device=self.device)

    def _bytes(self, array: Any, numbers: list[int]) -> npt.NDArray[np.uint8]:
        stored: npt.NDArray[np.uint8] = array[numbers].contiguous().view(torch.uint8).cpu().numpy()
        return stored

    def _resize(self, allocator: PageAllocator, capacity: int) -> None:
        """Reallocate all arrays of `allocator`. If memory runs out, raises torch.OutOfMemoryError and changes nothing."""
        larger = [self._stack(group, allocator, capacity) for group in self.groups]
        for group, stacks in zip(self.groups, larger, strict=True):
            group.tensors.update(stacks)
            for name, stack in stacks.items():
                self.arrays |= {f"{name}.{layer}": array for layer, array in zip(group.layers, stack, strict=True)}
        allocator.grow(capacity)
        self.moves += 1

    def _stack(self, group: LayerGroup, allocator: PageAllocator, capacity: int) -> dict[str, Tensor]:
        """Return larger stacks of a group for `capacity` pages or buffers of `allocator`, with the old contents copied."""
        stacks = {}
        for name, owner in self._allocators.items():
            array, _, layer = name.partition(".")
            if owner is allocator and int(layer) == group.layers[0]:
                old = self.tensors[name]
                shape = (capacity, *old.shape[1:])
                stacks[array] = allocate_stacked(len(group.layers), shape, old.dtype, self.device, self.alignment)
                if len(old):
                    stacks[array][:, : len(old)] = group.tensors[array]
        return stacks
