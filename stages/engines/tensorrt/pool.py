"""The paged pool on a GPU: like the pool of the ONNX engine, but in torch tensors whose addresses never change.

A step writes its new tokens on the device. Arrays with the same name, type and shape are stacked in one tensor, and so
are the plan's outputs for these arrays. One launch after the plan therefore writes the tokens of all layers.

Shapes: l layers, B sequences, S new tokens per sequence, T = B * S, H KV heads, N pages or buffers, W elements of a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from stages.core.errors import UserError
from stages.engines.onnx.bundle import NOT_FINITE
from stages.engines.paged.pool import PagedPool
from stages.engines.paged.sequences import PageAllocator
from stages.engines.staging import Section, allocate_stacked, saturated_product
from stages.engines.tensorrt.session import PlanStep
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
        self._factors: dict[str, torch.Tensor] = {}
        """First name of a stack -> the must-fail control's factors (l, 1, 1, 1) on written numbers."""
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

    def window_state(self, handles: Sequence[int]) -> list[Any]:
        """Return a snapshot of the windows for `restore`, because `places` moves them."""
        if self.policy.window is None:
            return []
        rows = [self.sequences[handle] for handle in handles]
        return [self.window_pages.state(), *((row, list(row.window_pages), row.first_window_page) for row in rows)]

    def restore(self, state: list[Any]) -> None:
        """Move the windows back to a snapshot, after a step that stored nothing."""
        for allocator_state in state[:1]:
            self.window_pages.restore(allocator_state)
        for row, pages, first in state[1:]:
            row.window_pages, row.first_window_page = pages, first

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

    @property
    def _kinds(self) -> dict[str, tuple[PageAllocator, int]]:
        """Input name of a list of places -> (allocator of the arrays, index among the allocator's lists)."""
        exact = bool(self.policy.sink_tokens) + bool(self.policy.recent_tokens)
        counts = {"page": (self.pages, 1), "window": (self.window_pages, self.policy.window is not None)}
        counts["buffer"] = (self.buffers, exact)
        copied = [stack.allocator for stack in self.stacks]
        return {
            f"places.{kind}.{i}": (allocator, i)
            for kind, (allocator, n) in counts.items()
            for i in range(n if allocator in copied else 0)
        }

    def sections(self, sizes: Mapping[str, int]) -> dict[str, Section]:
        """Return the inputs that `consume` reads: the places (3, T) of each list, and the counts of tokens and of places."""
        places: dict[str, Section] = dict.fromkeys(self._kinds, (torch.int64, (3, sizes["B"] * sizes["S"])))
        counts = {"tokens": sizes["B"], "stored_places": len(places)}
        return {name: (torch.int32, (count,)) for name, count in counts.items()} | places

    def put_places(self, step: PlanStep, handles: Sequence[int], tokens: int) -> None:
        """Set the places of every sequence's next `tokens` tokens. Padding repeats a list's first place, and so rewrites it."""
        columns = step.inputs["input_ids"].shape[1]
        places, counts = self.places(handles, tokens), []
        for name, (allocator, i) in self._kinds.items():
            chosen, number, slot = places[allocator][i]
            counts.append(chosen.size)
            filled = np.zeros(tuple(step.inputs[name].shape), np.int64)
            if chosen.size:
                filled[:, : chosen.size] = chosen // tokens * columns + chosen % tokens, number, slot
                filled[:, chosen.size :] = filled[:, :1]
            step.put(name, filled)
        step.put("tokens", np.full(len(handles), tokens, np.int32))
        step.put("stored_places", np.array(counts, np.int32))

    def results(self, step: PlanStep) -> Sequence[torch.Tensor]:
        """Return tensors for the logits (B, V) float32, and for the flag that the tokens were stored."""
        logits = torch.zeros(step.outputs["logits"].shape, dtype=torch.float32, device=self.device)
        return logits, torch.zeros((), dtype=torch.bool, device=self.device)

    def consume(self, step: PlanStep) -> None:
        """Write all new tokens to their places, or none if a key or value is not finite."""
        logits, stored = step.results
        sums, sizes = step.outputs[NOT_FINITE][..., 0], step.inputs["tokens"]  # padding rows have 0 tokens
        real = torch.arange(sums.shape[2], device=self.device) < sizes[:, None]
        stored.copy_(((sums == 0) | ~real[:, None]).all())
        logits.copy_(step.outputs["logits"])
        for stack, new in zip(self.stacks, step.families, strict=True):
            tokens = new.movedim(3, 2).flatten(1, 2)  # (l, T, H, W)
            for i, (name, (allocator, _)) in enumerate(self._kinds.items()):
                if allocator is stack.allocator:
                    chosen, number, slot = step.inputs[name]
                    writes = stored & (step.inputs["stored_places"][i] > 0)
                    self._write_stack(stack, tokens[:, chosen], number, slot, writes)

    def _write_stack(
        self, stack: Stack, new: torch.Tensor, number: torch.Tensor, slot: torch.Tensor, stored: torch.Tensor
    ) -> None:
        """Write `new` (l, T, H, W), or the old values again if `stored` is false, so that the host need not wait to decide."""
        if stack.names[0] in self._factors:
            new = saturated_product(new, self._factors[stack.names[0]])
        # (T, l, H, W): indices on both sides of a slice put their dimension first.
        current = stack.tensor[:, number, :, slot]
        stack.tensor[:, number, :, slot] = torch.where(stored, new.transpose(0, 1), current)

    def set_faults(self, faults: Mapping[str, float]) -> None:
        """From now on, multiply all numbers that are written to an array by the array's factor in `faults`."""
        for stack in self.stacks:
            if any(name in faults for name in stack.names):
                factors = [faults.get(name, 1.0) for name in stack.names]
                self._factors[stack.names[0]] = torch.tensor(factors, device=self.device)[:, None, None, None]
