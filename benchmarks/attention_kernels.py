"""Kernels that decode_attention.py measures over random caches: kvgate's, torch's SDPA, and FlashInfer's where installed.

Shapes: B sequences of T tokens, N pages, P pages of a sequence, H KV heads in groups of G query heads, Hq = H * G, D head_dim.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_cases import STORAGES, Case
from plugins.kv_attention import launch, ops, reference
from plugins.kv_attention.kernels.variants import Variant, decode_variant
from plugins.kv_attention.layout import PAGE_TOKENS

FILL_PAGES = 512
"""Pages that are filled with random numbers at once."""

AMAX = 6.0
"""Largest magnitude that static scales cover; the numbers are normally distributed."""

WORKSPACE_BYTES = 512 << 20
"""FlashInfer's workspace, for the partial sums of its splits."""

TUNED_WARPS = (1, 2, 4)
TUNED_STAGES = (1, 3, 5)
TUNED_RESIDENT = (4, 8, 16)
"""Programs per SM that the work is divided for."""


class Step:
    """A random cache whose pages lie in random order, and the bfloat16 inputs of one decode step.

    Args:
        case: Sizes.
        storage: Format of the cache, of STORAGES.
        device: Device of all tensors.
        seed: Seed of all random numbers.
    """

    def __init__(self, case: Case, storage: str, device: torch.device, seed: int) -> None:
        self.case, self.storage, self.layout = case, storage, case.layout(storage)
        self.scaling = 1 / math.sqrt(case.head_dim)
        rng = self.rng = torch.Generator(device).manual_seed(seed)
        pages = case.batch * case.pages
        self.cache = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            for name, (dtype, shape) in self.layout.pools(pages).items()
        }
        for side, form in (("key", self.layout.key), ("value", self.layout.value)):
            if form.static:
                self.cache[f"{side}_scale"] = torch.full((1,), AMAX / form.limit, device=device)
            for first in range(0, pages, FILL_PAGES):
                count = min(FILL_PAGES, pages - first)
                x = torch.randn(count, PAGE_TOKENS, case.kv_heads, case.head_dim, generator=rng, device=device)
                codes, scales = reference.quantize(x, form, self.cache.get(f"{side}_scale"))
                self.cache[f"{side}_pool"][first : first + count] = codes.transpose(1, 2)
                if scales is not None:
                    self.cache[f"{side}_scale_pool"][first : first + count] = scales.transpose(1, 2)
        order = torch.randperm(pages, generator=rng, device=device)
        self.page_table = order.view(case.batch, case.pages).int()
        self.lengths = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device)
        self.query = self._normal(case.q_heads)
        self.key_new, self.value_new = self._normal(case.kv_heads), self._normal(case.kv_heads)

    def _normal(self, heads: int) -> Tensor:
        shape = (self.case.batch, heads, self.case.head_dim)
        return torch.randn(shape, generator=self.rng, device=self.lengths.device).bfloat16()

    def expected(self, b: int, with_new: bool) -> Tensor:
        """Return the attention of sequence b in float32, (Hq, D), with or without the new token."""
        keys, values = reference.dequantize(self.layout, self.cache, self.page_table[b].long(), self.case.tokens)
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
    chosen: dict[str, Any]
    """Parameters in which it differs from the kernel's other candidates."""


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
    peer: bool = False
    """Whether it is not one of kvgate's. A peer that fails is skipped with its reason; a kernel of kvgate must not fail."""


def _shipped(step: Step) -> Iterator[Candidate]:
    """The shipped operator, which chooses its variant itself, with the work list that a step makes once for all its layers."""
    device, case = step.query.device, step.case
    sm = launch.compute_capability(device)
    variant = decode_variant(step.layout, group=case.group, query_dtype="bfloat16", scaling=step.scaling, sm=sm)
    programs = ops.default_programs(step.layout, step.query, step.page_table, step.scaling)
    work, sequences = ops.plan(step.lengths, programs)
    run = partial(
        ops.decode_attention,
        step.query,
        step.key_new,
        step.value_new,
        step.page_table,
        step.lengths,
        **step.cache,
        scaling=step.scaling,
        work=work,
        sequences=sequences,
    )
    yield Candidate(lambda: run, _parameters(variant, programs))


def _tuned(step: Step) -> Iterator[Candidate]:
    """The same kernels with other warps, stages and programs, which shows what a better choice would gain."""
    device, case = step.query.device, step.case
    sm = launch.compute_capability(device)
    default = decode_variant(step.layout, group=case.group, query_dtype="bfloat16", scaling=step.scaling, sm=sm)
    programs = ops.default_programs(step.layout, step.query, step.page_table, step.scaling)
    yield _launch_candidate(step, default, programs)
    if device.type == "cpu":
        return
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    counts = {
        launch.choose_programs(case.batch, case.kv_heads, case.pages, sm_count=sm_count, resident=resident)
        for resident in TUNED_RESIDENT
    }
    for warps, stages, count in product(TUNED_WARPS, TUNED_STAGES, sorted(counts | {programs})):
        if (warps, stages, count) != (default.num_warps, default.num_stages, programs):
            constants = default.constants | {"STAGES": stages}
            yield _launch_candidate(step, replace(default, constants=constants, num_warps=warps, num_stages=stages), count)


def _launch_candidate(step: Step, variant: Variant, programs: int) -> Candidate:
    plan = launch.plan_decode(step.lengths, programs=programs)

    def run() -> Tensor:
        return launch.decode_attention(
            step.layout,
            step.query,
            step.key_new,
            step.value_new,
            step.cache,
            page_table=step.page_table,
            lengths=step.lengths,
            plan=plan,
            scaling=step.scaling,
            variant=variant,
        )

    return Candidate(lambda: run, _parameters(variant, programs))


def _parameters(variant: Variant, programs: int) -> dict[str, int]:
    return {"programs": programs, "warps": variant.num_warps, "stages": variant.num_stages}


def _sdpa(step: Step) -> Iterator[Candidate]:
    """torch's scaled_dot_product_attention over contiguous keys and values (B, H, T, D).

    One candidate uses grouped heads, as documented. The other passes the query heads of a group as rows of one attention, so
    that keys and values are not read again for each of them.
    """
    case = step.case

    def contiguous(name: str) -> Tensor:
        paged = step.cache[name][step.page_table.long()]  # (B, P, H, 64, D)
        return paged.transpose(1, 2).flatten(2, 3)[:, :, : case.tokens]

    keys, values = contiguous("key_pool"), contiguous("value_pool")
    heads = step.query[:, :, None]
    rows = step.query.view(case.batch, case.kv_heads, case.group, case.head_dim)

    def grouped() -> Tensor:
        return scaled_dot_product_attention(heads, keys, values, scale=step.scaling, enable_gqa=True)[:, :, 0]

    def as_rows() -> Tensor:
        return scaled_dot_product_attention(rows, keys, values, scale=step.scaling).flatten(1, 2)

    yield Candidate(lambda: grouped, {"heads": "grouped"})
    yield Candidate(lambda: as_rows, {"heads": "as rows"})


def _flashinfer(step: Step) -> Iterator[Candidate]:
    """FlashInfer's batch decode over the same pools, which are its HND layout with pages of 64."""
    import flashinfer

    case, device = step.case, step.query.device
    indptr = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.pages
    last = torch.full((case.batch,), (case.tokens - 1) % PAGE_TOKENS + 1, dtype=torch.int32, device=device)
    pools = step.cache["key_pool"], step.cache["value_pool"]
    scales = {
        f"{side[0]}_scale": float(step.cache[f"{side}_scale"]) for side in ("key", "value") if f"{side}_scale" in step.cache
    }

    def prepare(tensor_cores: bool) -> Callable[[], Tensor]:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
        wrapper.plan(
            indptr,
            step.page_table.flatten(),
            last,
            case.q_heads,
            case.kv_heads,
            case.head_dim,
            PAGE_TOKENS,
            q_data_type=torch.bfloat16,
            kv_data_type=pools[0].dtype,
            sm_scale=step.scaling,
        )
        return partial(wrapper.run, step.query, pools, **scales)

    for tensor_cores in (True, False):
        yield Candidate(partial(prepare, tensor_cores), {"tensor_cores": tensor_cores})


KERNELS = (
    *(Kernel(storage, storage, _shipped, 4e-3, with_new=True) for storage in STORAGES),
    *(Kernel(f"{storage} tuned", storage, _tuned, 4e-3, with_new=True) for storage in STORAGES),
    Kernel("flashinfer fp8", "fp8", _flashinfer, 3e-2, peer=True),
    Kernel("flashinfer bf16", "bf16", _flashinfer, 1e-2, peer=True),
    Kernel("sdpa bf16", "bf16", _sdpa, 1e-2, extra_copies=2, peer=True),
)
"""The first three are the shipped kernels, the next three the same kernels tuned, the others peers."""


def unavailable_reason(kernel: Kernel) -> str | None:
    """Return why a kernel cannot run on this machine, None when it can."""
    return "flashinfer is not installed" if "flashinfer" in kernel.name and find_spec("flashinfer") is None else None


def relative_error(kernel: Kernel, step: Step, out: Tensor) -> float:
    """Return the relative L2 error of out (B, Hq, D): the larger of those of the first and the last sequence."""
    errors = []
    for b in {0, step.case.batch - 1}:
        expected = step.expected(b, kernel.with_new)
        errors.append(float((out[b].float() - expected).norm() / expected.norm()))
    return max(errors, key=lambda error: (math.isnan(error), error))
