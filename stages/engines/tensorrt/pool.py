"""The paged pool of TensorRT plans, in torch tensors whose addresses never change.

The plan's outputs are stacked like the pool's arrays, so that one launch writes the new tokens of all layers of a group.

Shapes: l layers, B sequences, S columns of new tokens, H KV heads, W elements of a token.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from stages.core.errors import UserError
from stages.engines.paged.torch_pool import TorchPool
from stages.engines.staging import saturated_product
from stages.engines.tensorrt.shapes import PlanLimits
from stages.policies.policy import KVShape


class PlanPool(TorchPool):
    """A pool that is allocated once, because a plan's bindings and captured CUDA graphs contain addresses."""

    def __init__(self, limits: PlanLimits, shape: KVShape, device: torch.device) -> None:
        self.limits = limits
        super().__init__(limits.policy, shape, limits.pages, device)
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

    @property
    def families(self) -> Sequence[Sequence[str]]:
        """Names of the plans' outputs, by stack."""
        return [[f"new_{name}.{layer}" for layer in group.layers] for group in self.groups for name in group.tensors]

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
        stacks = [(f"{name}.{group.layers[0]}", stack) for group in self.groups for name, stack in group.tensors.items()]
        for (name, stack), new in zip(stacks, families, strict=True):
            rows = new.movedim(3, 2).flatten(1, 2)  # (l, B * S, H, W)
            for source, pages, slots in places[self._allocators[name]]:
                # Indices on both sides of a slice put their dimension first: (tokens, l, H, W).
                written = rows[:, source].transpose(0, 1)
                # The fault affects all layers of a stack equally, because they have the same format.
                factor = faults.get(name)
                stack[:, pages, :, slots] = written if factor is None else saturated_product(written, factor)
        self.advance(handles, tokens)
