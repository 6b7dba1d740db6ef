"""The paged pool on a GPU: like the pool of the ONNX engine, but in torch tensors whose addresses never change.

Arrays with the same name, type and shape are stacked in one tensor, and so are the plan's outputs for these arrays. One
launch therefore writes the new tokens of all their layers.

Shapes: l layers, B sequences, S columns of new tokens, H KV heads, N pages or buffers, W elements of a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from stages.core.errors import UserError
from stages.engines.paged.pool import PagedPool
from stages.engines.paged.sequences import PageAllocator
from stages.engines.staging import allocate_stacked, saturated_product
from stages.engines.tensorrt.shapes import PlanLimits
from stages.policies.policy import KVShape


@dataclass(frozen=True)
class Stack:
    """Arrays of several layers, stacked in one tensor."""

    names: list[str]
    tensor: torch.Tensor
    """The stacked arrays, (l, N, H, 64 or exact slots, W)."""
    allocator: PageAllocator


class TorchPool(PagedPool):
    """A pool that is allocated once, because a plan's bindings and captured CUDA graphs contain addresses."""

    def __init__(self, limits: PlanLimits, shape: KVShape, device: torch.device) -> None:
        self.limits, self.device = limits, device
        self.stacks: list[Stack] = []
        super().__init__(limits.policy, shape, limits.pages)
        for allocator, capacity in (
            (self.pages, limits.pages),
            (self.buffers, limits.max_batch),
            (self.window_pages, limits.fixed["NW"] if limits.policy.window is not None else 0),
        ):
            self._resize(allocator, capacity)

    def start(self) -> int:
        if not self.buffers.free_count:
            raise UserError(
                f"backend.max_batch={self.limits.max_batch}: the engine supports no more sequences at once; raise it and "
                "build again, or lower workloads.batch_size or workloads.load.batch"
            )
        return super().start()

    def reserve(self, handles: Sequence[int], tokens: int) -> None:
        longest = max(self.length(handle) for handle in handles) + tokens
        if longest > self.limits.max_tokens:
            raise UserError(
                f"backend.max_tokens={self.limits.max_tokens}: a sequence would have {longest} tokens; raise it and build again"
            )
        super().reserve(handles, tokens)

    def scale_array(self, name: str, factor: float) -> None:
        array = self.tensors[name]
        array.copy_(saturated_product(array, factor))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return cast(dict[str, torch.Tensor], self.arrays)

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        # The types have the same names in numpy and torch, because FP8 codes are stored as uint8.
        kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, np.dtype(dtype).name)
        return torch.zeros(shape, dtype=kind, device=self.device)

    def _bytes(self, array: Any, numbers: list[int]) -> npt.NDArray[np.uint8]:
        stored: npt.NDArray[np.uint8] = array[numbers].contiguous().view(torch.uint8).cpu().numpy()
        return stored

    def _resize(self, allocator: PageAllocator, capacity: int) -> None:
        """Allocate the arrays of `allocator`. Called once per allocator."""
        allocator.grow(capacity)
        stacks: dict[tuple[Any, ...], list[str]] = {}
        for name, array in self.tensors.items():
            if self._allocators[name] is allocator:
                stacks.setdefault((name.partition(".")[0], array.dtype, array.shape[1:]), []).append(name)
        for (_, dtype, shape), names in stacks.items():
            tensor = allocate_stacked(len(names), (capacity, *shape), dtype, self.device)
            self.stacks.append(Stack(names, tensor, allocator))
            self.arrays |= dict(zip(names, tensor, strict=True))

    @property
    def families(self) -> Sequence[Sequence[str]]:
        """Names of the plans' outputs, by stack."""
        return [[f"new_{name}" for name in stack.names] for stack in self.stacks]

    def store(self, handles: Sequence[int], tokens: int, families: Sequence[torch.Tensor], faults: Mapping[str, float]) -> None:
        """Append `tokens` tokens to every sequence.

        `families`: the plan's outputs (l, B, H, S, W) by stack, padded. `faults`: array -> factor on the written numbers.
        """
        columns = families[0].shape[3]
        places = {
            allocator: [
                torch.from_numpy(np.stack([chosen // tokens * columns + chosen % tokens, number, slot])).to(self.device)
                for chosen, number, slot in chosen_places
            ]
            for allocator, chosen_places in self.places(handles, tokens).items()
        }
        for stack, new in zip(self.stacks, families, strict=True):
            rows = new.movedim(3, 2).flatten(1, 2)  # (l, B * S, H, W)
            for source, pages, slots in places[stack.allocator]:
                # Indices on both sides of a slice put their dimension first: (tokens, l, H, W).
                written = rows[:, source].transpose(0, 1)
                # The fault affects all arrays of a stack equally, because they have the same format.
                factor = faults.get(stack.names[0])
                stack.tensor[:, pages, :, slots] = written if factor is None else saturated_product(written, factor)
        self.advance(handles, tokens)
