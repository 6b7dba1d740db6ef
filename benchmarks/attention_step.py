"""What every kernel of decode_attention.py gets, a random cache with the inputs of one step, and what a kernel says of itself.

Shapes: B sequences, N pages, P pages of the longest sequence, H KV heads in groups of G query heads, Hq = H * G, D head_dim.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.attention_cases import Case
from plugins.kv_attention import reference
from plugins.kv_attention.layout import PAGE_TOKENS

FILL_PAGES = 512
"""Pages that are filled with random numbers at once."""


class Step:
    """A random cache whose pages lie in random order, and the bfloat16 inputs of one decode step.

    Static scales are 1, which the numbers suit, normally distributed as they are: some peers apply another scale of the values
    in a kernel of its own, which their format does not need.
    """

    def __init__(self, case: Case, storage: str, device: torch.device, seed: int) -> None:
        self.case, self.storage, self.layout = case, storage, case.layout(storage)
        self.scaling = 1 / math.sqrt(case.head_dim)
        rng = self.rng = torch.Generator(device).manual_seed(seed)
        pages = sum(case.page_counts)
        self.cache = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            for name, (dtype, shape) in self.layout.pools(pages).items()
        }
        for side, form in (("key", self.layout.key), ("value", self.layout.value)):
            if form.static:
                self.cache[f"{side}_scale"] = torch.ones(1, device=device)
            for first in range(0, pages, FILL_PAGES):
                count = min(FILL_PAGES, pages - first)
                x = torch.randn(count, PAGE_TOKENS, case.kv_heads, case.head_dim, generator=rng, device=device)
                codes, scales = reference.quantize(x, form, self.cache.get(f"{side}_scale"))
                self.cache[f"{side}_pool"][first : first + count] = codes.transpose(1, 2)
                if scales is not None:
                    self.cache[f"{side}_scale_pool"][first : first + count] = scales.transpose(1, 2)
        self.pages = torch.randperm(pages, generator=rng, device=device).int()
        """Page numbers of all sequences, one after the other."""
        self.page_table = torch.zeros(case.batch, case.pages, dtype=torch.int32, device=device)
        first = 0
        for b, count in enumerate(case.page_counts):
            self.page_table[b, :count] = self.pages[first : first + count]
            first += count
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        self.query = self._normal(case.q_heads)
        self.key_new, self.value_new = self._normal(case.kv_heads), self._normal(case.kv_heads)

    def _normal(self, heads: int) -> Tensor:
        shape = (self.case.batch, heads, self.case.head_dim)
        return torch.randn(shape, generator=self.rng, device=self.lengths.device).bfloat16()

    def expected(self, b: int, with_new: bool) -> Tensor:
        """Return the attention of sequence b in float32, (Hq, D), with or without the new token."""
        keys, values = reference.dequantize(self.layout, self.cache, self.page_table[b].long(), self.case.lengths[b])
        if with_new:
            keys = torch.cat([keys, self.key_new[b, :, None].float()], 1)
            values = torch.cat([values, self.value_new[b, :, None].float()], 1)
        query = self.query[b].float().view(self.case.kv_heads, self.case.group, -1)
        scores = query @ keys.mT * self.scaling
        return (scores.softmax(-1) @ values).flatten(0, 1)


@dataclass(frozen=True)
class Candidate:
    """One configuration of a kernel; of several, the fastest counts."""

    prepare: Callable[[], Callable[[], Tensor]]
    """Returns a function that runs the kernel and returns (B, Hq, D). If it fails for a peer, the peer's other candidates
    still count."""
    chosen: str = ""
    """In what it differs from the kernel's other candidates."""


@dataclass(frozen=True)
class Kernel:
    """A kernel over one storage."""

    name: str
    storage: str
    candidates: Callable[[Step], Iterator[Candidate]]
    """Yields the candidates for a step, the default one first."""
    tolerance: float
    """Largest relative L2 error of the outputs. Rounding to bfloat16 alone gives 1.7e-3, 2^-9 at most per number."""
    with_new: bool = False
    """Whether it attends to the new token besides the cached ones, which is one token more in thousands."""
    extra_copies: int = 0
    """Copies of the cache that it allocates for itself."""
    library: str | None = None
    """Package that it is of, None for kvgate's. Where that is not installed it is skipped, and a failure of it is recorded;
    a kernel of kvgate must not fail."""
    ragged: bool = True
    """Whether it takes sequences of different lengths."""

    @property
    def peer(self) -> bool:
        """Whether it is not one of kvgate's."""
        return self.library is not None


def relative_error(kernel: Kernel, step: Step, out: Tensor) -> float:
    """Return the relative L2 error of out (B, Hq, D): the larger of those of the first and the last sequence."""
    errors = []
    for b in {0, step.case.batch - 1}:
        expected = step.expected(b, kernel.with_new)
        errors.append(float((out[b].float() - expected).norm() / expected.norm()))
    return max(errors, key=lambda error: (math.isnan(error), error))
