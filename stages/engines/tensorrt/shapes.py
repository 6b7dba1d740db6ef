"""Sizes of a plan's dynamic dimensions: the ranges of the build, the few sizes that the engine uses, and TensorRT's limits.

Dimensions are named as in the graphs: B sequences, S new tokens per sequence, P pages of a sequence's table, N pages of the
pool, M exact buffers, Y pages of a sequence in the window, NW pages of the window's pool.

The function body of attention gathers and scores all positions of the page table, and a plan's memory is sized for the largest
table, even if the actual sequences are short. So prompts are prefilled one at a time. The attention plugin has no such tensor,
and its kernels compute addresses in 64 bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stages.core.errors import UserError
from stages.core.records import PREFILL_CHUNK
from stages.policies.policy import PAGE_TOKENS, KVPolicy, KVShape, page_count

MAX_ELEMENTS = 2**31 - 1
"""Maximum elements of a tensor: TensorRT's layers index in 32 bits (NVIDIA/TensorRT issues 1948, 3815, 4123)."""


class Range(NamedTuple):
    """Smallest and largest size of a dimension. Plans are optimized for the largest."""

    smallest: int
    largest: int


@dataclass(frozen=True)
class PlanLimits:
    """The sizes of the pools and plans of one engine."""

    policy: KVPolicy
    max_batch: int
    max_tokens: int

    @property
    def sequence_pages(self) -> int:
        """Maximum pages of a sequence."""
        return page_count(self.max_tokens)

    @property
    def pages(self) -> int:
        return self.max_batch * self.sequence_pages

    @property
    def sequence_window_pages(self) -> int:
        """Maximum window pages of a sequence: one more than `window.tokens` fill, because a window may start within a page."""
        window = self.policy.window
        return 0 if window is None else min(self.sequence_pages, window.tokens // PAGE_TOKENS + 1)

    @property
    def window_pages(self) -> int:
        return self.max_batch * self.sequence_window_pages

    @property
    def chunk(self) -> int:
        """Maximum tokens of a sequence in one prefill run."""
        return min(PREFILL_CHUNK, self.max_tokens)

    def ranges(self, mode: str) -> dict[str, Range]:
        """Return the range of every dimension. Pools have a fixed size, so that their addresses and shapes never change."""
        rows = 1 if mode == "prefill" else self.max_batch
        largest = {"B": rows, "P": self.sequence_pages, "S": self.chunk}
        fixed = {"Y": max(1, self.sequence_window_pages), **self.fixed}
        return {name: Range(1, n) for name, n in largest.items()} | {name: Range(n, n) for name, n in fixed.items()}

    @property
    def fixed(self) -> dict[str, int]:
        """Sizes of the first dimensions of the pools, by dimension name."""
        return {"N": self.pages, "M": self.max_batch, "NW": max(1, self.window_pages)}


def bucket(size: int, largest: int) -> int:
    """Return the smallest power of two that is at least `size`, or `largest` if that is less.

    This keeps the number of shapes small, because every shape is captured separately.

    >>> [bucket(size, 12) for size in (1, 3, 9)]
    [1, 4, 12]
    """
    if not 1 <= size <= largest:
        raise ValueError(f"a size of {size} is outside 1 .. {largest}")
    return min(largest, 1 << (size - 1).bit_length())


def pad(values: npt.NDArray[np.generic], shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    """Return `values`, padded with zeros at the end of every dimension to `shape`."""
    out = np.zeros(shape, values.dtype)
    out[tuple(slice(size) for size in values.shape)] = values
    return out


def check_extents(
    policy: KVPolicy, shape: KVShape, q_heads: int, layers: Iterable[int], *, max_batch: int, max_tokens: int
) -> None:
    """Raise UserError if the function body of any layer in `layers` would have a tensor that TensorRT cannot address."""
    limits = PlanLimits(policy, max_batch, max_tokens)
    # A function body scores these positions for every query.
    positions = PAGE_TOKENS * (limits.sequence_pages + limits.sequence_window_pages) + policy.exact_tokens
    scores = q_heads * max(limits.chunk * (positions + limits.chunk), max_batch * (positions + 1))
    for layer in layers:
        pools = [
            (limits.window_pages if side.in_window else limits.pages)
            * shape.kv_heads
            * PAGE_TOKENS
            * shape.head_dim
            // max(1, 8 // form.code.bits)
            for side, form in policy.sides(layer).items()
        ]
        elements = max(scores, *pools)
        if elements > MAX_ELEMENTS:
            raise UserError(
                f"backend.max_batch={max_batch}, backend.max_tokens={max_tokens}: layer {layer} of kv={policy.name} "
                f"would have a tensor of {elements:,} elements, but TensorRT allows {MAX_ELEMENTS:,}; lower one of the two"
            )
