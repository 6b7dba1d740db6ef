"""What a reference engine's own cache holds of a sequence, as other engines show theirs."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.core.kv import Side
from pipeline.core.records import StoredCopy
from stages.engines.oracle.cache import LayerCache, Pages
from stages.engines.oracle.engine import OracleEngine


def stored_copies(engine: OracleEngine, handle: int) -> list[dict[Side, StoredCopy]]:
    """Return the pages of every layer, of a policy that frees none."""
    caches: Any = engine.sequences[handle]
    return [_of_layer(cache) for cache in caches]


def _of_layer(cache: LayerCache) -> dict[Side, StoredCopy]:
    return {side: _copy(pages) for side, pages in cache.pages.items()}


def _copy(pages: Pages) -> StoredCopy:
    by_page = zip(*(page.tensors for page in pages.pages), strict=True)
    parts = [_array(torch.cat([_raw(one) for one in tensors], dim=1)[:, : pages.length]) for tensors in by_page]
    codes, scale, zero = [*parts, None, None][:3]
    assert codes is not None
    static = pages.storage.static
    static_zero = None if static is None else static.zero
    return StoredCopy(0, codes, scale, zero, None if static is None else _array(static.scale),
                      None if static_zero is None else _array(static_zero))  # fmt: skip


def _raw(x: Tensor) -> Tensor:
    """8-bit numbers as bytes, and bfloat16, which numpy lacks, as int16."""
    return x.view(torch.uint8) if x.element_size() == 1 else x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _array(x: Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = x.contiguous().cpu().numpy()
    return array
