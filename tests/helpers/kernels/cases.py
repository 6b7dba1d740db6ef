"""Random caches for the kernel tests. All memory that must not be read is filled with poison.

Shapes: B sequences, H KV heads, G query heads per KV head, N pages, P columns of the page table, M exact buffers, D
head_dim.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import attention_reference as reference
from plugins.kv_attention.layout import CODES, PAGE_TOKENS, CacheLayout, SideLayout, Spec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = ["fp16", "bf16", *(f"{dtype} {scales}" for dtype in ("fp8_e4m3", "int8") for scales in ("tensor", "head", "token"))]
VALUES = [*KEYS, "int4 token", *(f"int4 {size}" for size in CODES["int4"].group_sizes), "nvfp4 16"]
"""Every key format and every value format that the kernels support, in the notation of `side`."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_PAGE = 1 << 30
"""A page number far beyond any memory; reading this page crashes."""


def side(name: str) -> SideLayout:
    """Parse one side's format: 'bf16', 'int8 head', 'fp8_e4m3 tensor', 'int4 token', 'int4 64'."""
    dtype, _, scales = name.partition(" ")
    if scales.isdigit():
        return SideLayout(dtype, "per_group", int(scales))  # type: ignore[arg-type]
    return SideLayout(dtype, f"per_{scales}" if scales else "none")  # type: ignore[arg-type]


def poison(spec: Spec, *leading: int) -> Tensor:
    """Return a tensor of NaN, or of 127 for integers (as a packed byte: a pair of sevens)."""
    dtype, shape = getattr(torch, spec[0]), (*leading, *spec[1])
    if not dtype.is_floating_point:
        return torch.full(shape, 127, dtype=dtype)
    return torch.full((torch.Size(shape).numel() * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype).reshape(shape)


@dataclass
class KernelCase:
    """One layer's cache of B sequences, and the new tokens of a decode step or of chunks of prompts."""

    layout: CacheLayout
    lengths: list[int]
    group: int = 4
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    tokens: int = 1
    """New tokens of every sequence."""
    cache: dict[str, Tensor] = field(init=False)
    page_table: Tensor = field(init=False)
    exact_slots: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        layout, batch = self.layout, len(self.lengths)
        self.rng = torch.Generator().manual_seed(self.seed)
        columns = max(-(-length // PAGE_TOKENS) for length in self.lengths) + 1
        pages, buffers = batch * columns + 1, batch + 1
        self.cache = {name: poison(spec) for name, spec in (layout.pools(pages) | layout.exact_buffers(buffers)).items()}
        for name, (_, shape) in layout.static_scales().items():
            limit = (layout.key if name == "key_scale" else layout.value).codes.limit
            self.cache[name] = 3.0 / limit * (0.5 + torch.rand(shape, generator=self.rng))
        self.page_table = torch.full((batch, columns), NO_PAGE, dtype=torch.int32)
        self.exact_slots = torch.randperm(buffers, generator=self.rng)[:batch].int() if layout.exact_tokens else None
        free = iter(torch.randperm(pages, generator=self.rng).tolist())
        for b, length in enumerate(self.lengths):
            for column in range(-(-length // PAGE_TOKENS)):
                self.page_table[b, column] = next(free)
            self._fill(b, length)
        rows, heads, dim = batch * self.tokens, layout.kv_heads, layout.head_dim
        self.query = self.random(rows, heads * self.group, dim).to(self.dtype)
        self.key_new, self.value_new = (self.random(rows, heads, dim).to(self.dtype) for _ in range(2))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng)

    def _fill(self, b: int, length: int) -> None:
        """Store random tokens in a sequence's pages, and other random tokens in its exact slots."""
        layout = self.layout
        positions = torch.arange(length)
        pages, rows = self.page_table[b, positions // PAGE_TOKENS].long(), positions % PAGE_TOKENS
        _, slots = reference.exact_places(layout, length)
        for name, form, spread in (("key", layout.key, 1), ("value", layout.value, 6)):
            # Tokens differ in magnitude, like real values; the largest dominate the sums of attention.
            powers = torch.exp2(torch.randint(-spread, spread + 1, (length, layout.kv_heads, 1), generator=self.rng))
            x = self.random(length, layout.kv_heads, layout.head_dim) * powers
            codes, scales = reference.quantize(x, form, self.cache.get(f"{name}_scale"))
            self.cache[f"{name}_pool"][pages, :, rows] = codes
            if scales is not None:
                self.cache[f"{name}_scale_pool"][pages, :, rows] = scales
            if self.exact_slots is not None:
                exact = self.random(layout.kv_heads, len(slots), layout.head_dim)
                self.cache[f"{name}_exact"][self.exact_slots[b], :, slots] = exact.half()

    @property
    def step(self) -> dict[str, Any]:
        """Every tensor except the cache's, by the name of the launch's argument."""
        tables = {"page_table": self.page_table, "lengths": torch.tensor(self.lengths, dtype=torch.int32)}
        new = {"query": self.query, "key_new": self.key_new, "value_new": self.value_new, "exact_slots": self.exact_slots}
        return new | tables

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a launch, on the device."""
        return on_device(self.step) | {"cache": on_device(self.cache)}

    def expected(self, scaling: float) -> Tensor:
        """Return the reference's attention, (X, H * G, D) float32."""
        return reference.attend(self.layout, cache=self.cache, scaling=scaling, **self.step)


def case_of(key: str, value: str, heads: int, dim: int, lengths: list[int], **fields: Any) -> KernelCase:
    """Return a case. `fields`: `sink` and `recent` tokens, and fields of KernelCase."""
    layout = CacheLayout(heads, dim, side(key), side(value), fields.pop("sink", 0), fields.pop("recent", 0))
    return KernelCase(layout, lengths, **fields)


def on_device(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return copies on the GPU, or the tensors themselves if kernels are interpreted."""
    return {name: None if tensor is None else tensor.to(DEVICE) for name, tensor in tensors.items()}


def differs(actual: Tensor, expected: Tensor) -> Tensor:
    """Return a mask of the elements that differ in any bit. All NaNs of 16 or 32 bits count as equal."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.itemsize]
    unequal = actual.cpu().view(bits) != expected.view(bits)
    return unequal if expected.itemsize == 1 else unequal & ~(actual.cpu().isnan() & expected.isnan())


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise if any operation waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
