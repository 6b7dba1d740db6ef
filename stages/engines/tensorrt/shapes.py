"""Sizes of a plan's dynamic dimensions: the ranges that it is built for, and the few sizes that the engine uses.

Dimensions are named as in the graphs: B sequences, S new tokens of each, P pages of a sequence's table, N pages of the
pool, M exact buffers, Y pages of a sequence in the window, NW pages of the window's pool. Where a plan stores tokens itself,
NS and MS are the pages and buffers of a layer in a stack of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.kv import PAGE_TOKENS, KVPolicy
from pipeline.core.records import PREFILL_CHUNK
from pipeline.core.strict import StrictModel


class Range(StrictModel):
    """Smallest, most likely and largest size of a dimension."""

    smallest: int
    likely: int
    largest: int


@dataclass(frozen=True)
class Limits:
    """The sizes of the pools and plans of one engine."""

    policy: KVPolicy
    max_batch: int
    max_tokens: int
    prefill_rows: int = 1
    """Most sequences of a prefill run (extents.prefill_rows)."""

    @property
    def sequence_pages(self) -> int:
        """Pages of a sequence at most."""
        return -(-self.max_tokens // PAGE_TOKENS)

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.max_batch * self.sequence_pages

    @property
    def sequence_window_pages(self) -> int:
        """Window pages of a sequence at most: one more than the window's, because its start lies within a page."""
        window = self.policy.window
        return 0 if window is None else min(self.sequence_pages, window.tokens // PAGE_TOKENS + 1)

    @property
    def window_pages(self) -> int:
        """Pages of the window's pool."""
        return self.max_batch * self.sequence_window_pages

    @property
    def chunk(self) -> int:
        """Most tokens of a sequence in one prefill run."""
        return min(PREFILL_CHUNK, self.max_tokens)

    def ranges(self, mode: str) -> dict[str, Range]:
        """Return the range of every dimension. Pools have one size, so that their addresses and shapes never change."""
        rows = self.prefill_rows if mode == "prefill" else self.max_batch
        largest = {"B": rows, "P": self.sequence_pages, "S": self.chunk}
        fixed = {"Y": max(1, self.sequence_window_pages), **self.fixed}
        return {name: Range(smallest=1, likely=n, largest=n) for name, n in largest.items()} | {
            name: Range(smallest=n, likely=n, largest=n) for name, n in fixed.items()
        }

    @property
    def fixed(self) -> dict[str, int]:
        """First dimensions of the pools."""
        stacked = {"NS": stack_rows(self.pages), "MS": stack_rows(self.max_batch)}
        return {"N": self.pages, "M": self.max_batch, "NW": max(1, self.window_pages)} | stacked


def stack_rows(rows: int) -> int:
    """Return the pages or buffers that a layer takes in a stack of several: an even number.

    Two rows of any array that the kernels hold are a multiple of 256 bytes, so that every layer of a stack without gaps begins
    where TensorRT takes an address.

    >>> [stack_rows(rows) for rows in (3, 4)]
    [4, 4]
    """
    return rows + rows % 2


def bucket(size: int, largest: int) -> int:
    """Return the next power of two from `size` on, or `largest` if that is less.

    So there are few shapes, each of which is captured once.

    >>> [bucket(size, 12) for size in (1, 3, 9)]
    [1, 4, 12]
    """
    if not 1 <= size <= largest:
        raise ValueError(f"a size of {size} is outside 1 .. {largest}")
    return min(largest, 1 << (size - 1).bit_length())


def plan_run(left: Sequence[int], chunk: int, rows: int) -> list[tuple[int, int]]:
    """Return which prompts take part in a prefill run, by number, and how many tokens of each.

    A prompt is cut into chunks as if it were alone, since its tokens attend to those of earlier chunks through the quantized
    cache. Chunks of one bucket run together, that of the first prompt: a short one would be padded to many times its tokens.

    Args:
        left: Tokens of each prompt that are still to come.
        chunk: Most tokens of a prompt in a run.
        rows: Most prompts of a run.

    >>> plan_run([0, 700, 3, 1024, 600], chunk=1024, rows=4)
    [(1, 700), (3, 1024), (4, 600)]
    """
    sizes = [(i, min(chunk, tokens)) for i, tokens in enumerate(left) if tokens]
    first = bucket(sizes[0][1], chunk)
    return [(i, size) for i, size in sizes if bucket(size, chunk) == first][:rows]


def padded(values: npt.NDArray[np.generic], shape: tuple[int, ...], fill: int = 0) -> npt.NDArray[np.generic]:
    """Return an array of `shape` that begins with `values` in every dimension and is filled up with `fill`."""
    out = np.full(shape, fill, values.dtype)
    out[tuple(slice(size) for size in values.shape)] = values
    return out
