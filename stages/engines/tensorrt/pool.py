"""The paged pool on a GPU: the pages and tables of the ONNX engine, in torch tensors whose addresses never change."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from pipeline.core.errors import UserError
from pipeline.core.formats import MAX_FLOAT16
from pipeline.core.kv import KVShape
from stages.engines.paged.eviction import Indices
from stages.engines.paged.pool import Factor, PagedPool
from stages.engines.tensorrt.shapes import Limits

STORAGE = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""torch's type of the same bytes, by the numpy type of the ONNX engine's pool (FP8 codes are bytes in both)."""


class TorchPool(PagedPool):
    """A pool that is allocated once, since a plan's bindings and a captured CUDA graph contain addresses."""

    def __init__(self, limits: Limits, shape: KVShape, device: torch.device) -> None:
        self.limits, self.device = limits, device
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
                f"backend.max_batch={self.limits.max_batch}: the engine was built for so many sequences at once; raise it and "
                "build again, or ask for fewer at once (workloads.batch_size, workloads.load.batch)"
            )
        return super().start()

    def reserve(self, handles: Sequence[int], tokens: int) -> None:
        longest = max(self.length(handle) for handle in handles) + tokens
        if longest > self.limits.max_tokens:
            raise UserError(
                f"backend.max_tokens={self.limits.max_tokens}: a sequence would get {longest} tokens; raise it and build again"
            )
        super().reserve(handles, tokens)

    def scale_array(self, name: str, factor: Factor) -> None:
        array = self.tensors[name]
        array.copy_(scaled(array, factor))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The pool's arrays, typed as the tensors that they are."""
        return cast(dict[str, torch.Tensor], self.arrays)

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        kind = dtype if isinstance(dtype, torch.dtype) else STORAGE[np.dtype(dtype).name]
        return torch.zeros(shape, dtype=kind, device=self.device)

    def _bytes(self, array: Any, numbers: list[int]) -> npt.NDArray[np.uint8]:
        held: npt.NDArray[np.uint8] = array[numbers].contiguous().view(torch.uint8).cpu().numpy()
        return held

    def _index(self, place: tuple[Indices, Indices, Indices]) -> tuple[Any, Any, Any]:
        chosen, number, slot = (torch.from_numpy(np.ascontiguousarray(part)).to(self.device) for part in place)
        return chosen, number, slot


def scaled(values: torch.Tensor, factor: Factor) -> torch.Tensor:
    """Return floating-point values times a factor, saturating at float16's range."""
    return (values.float() * torch.as_tensor(factor, device=values.device)).clamp(-MAX_FLOAT16, MAX_FLOAT16).to(values.dtype)
