"""The kernels of decode_attention.py: kvgate's as shipped, and the peers torch's SDPA and, if installed, FlashInfer.

FlashInfer reads kvgate's pools without conversion (its layout HND). Calls follow the signatures of FlashInfer 0.6.18.

Shapes: B sequences of at most T tokens, N pages, P pages of a sequence, H KV heads in groups of G query heads, Hq = H * G, D
head_dim.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_bench import DecodeInputs, Kernel, KernelConfiguration
from benchmarks.attention_cases import STORAGES
from plugins.kv_attention import launch
from plugins.kv_attention.layout import PAGE_TOKENS

WORKSPACE_BYTES = 512 << 20
"""Bytes of FlashInfer's workspace for the partial sums of its splits. XQA needs a workspace filled with zeros."""


def _shipped(step: DecodeInputs) -> Iterator[KernelConfiguration]:
    """Yield kvgate's launch, with a ready work list, because a step makes it once for all layers."""
    programs = launch.default_programs(step.layout, step.query, step.page_table, step.scaling)
    plan = launch.plan_decode(step.layout, step.lengths, programs=programs)
    inputs = (step.layout, step.query, step.key_new, step.value_new, step.cache, step.page_table, step.lengths)
    run = partial(launch.decode_attention, *inputs, plan=plan, scaling=step.scaling)
    yield KernelConfiguration(lambda: run, f"programs {programs}")


def _sdpa(step: DecodeInputs) -> Iterator[KernelConfiguration]:
    """Yield torch's scaled_dot_product_attention over contiguous keys and values (B, H, T, D).

    One candidate uses grouped heads, as documented. The other candidate passes the query heads of a group as rows of one
    attention, so that keys and values are read once per group.
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

    yield KernelConfiguration(lambda: grouped, "grouped heads")
    yield KernelConfiguration(lambda: as_rows, "heads as rows")


def _wrapper(step: DecodeInputs, tensor_cores: bool, backend: str) -> Callable[[], Tensor]:
    """Plan FlashInfer's batch decode over the pages of every sequence, and return the function that runs it."""
    import flashinfer

    case, device = step.case, step.query.device
    counts = torch.tensor(case.page_counts, dtype=torch.int32)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)]).to(device)
    last = (step.lengths - 1) % PAGE_TOKENS + 1
    pools = step.cache["key_pool"], step.cache["value_pool"]
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores, backend=backend)
    wrapper.plan(
        indptr,
        step.pages,
        last,
        case.q_heads,
        case.kv_heads,
        case.head_dim,
        PAGE_TOKENS,
        q_data_type=step.query.dtype,
        kv_data_type=pools[0].dtype,
        o_data_type=torch.bfloat16,
        sm_scale=step.scaling,
    )
    return partial(wrapper.run, step.query, pools)


def _flashinfer(step: DecodeInputs) -> Iterator[KernelConfiguration]:
    """Yield FlashInfer's batch decode with its kernels for bfloat16 queries. FA3 does not support an FP8 cache."""
    backends = ((True, "fa2"), (False, "auto")) if step.storage == "fp8" else ((True, "fa2"), (True, "fa3"), (False, "auto"))
    for tensor_cores, backend in backends:
        yield KernelConfiguration(partial(_wrapper, step, tensor_cores, backend), f"{backend}{', tensor cores' * tensor_cores}")


def _flashinfer_xqa(step: DecodeInputs) -> Iterator[KernelConfiguration]:
    """Yield the kernel that FlashInfer selects for the GPU: XQA, or trtllm-gen on compute capability 10."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    def prepare() -> Callable[[], Tensor]:
        return partial(
            trtllm_batch_decode_with_kv_cache,
            step.query,
            (step.cache["key_pool"], step.cache["value_pool"]),
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=step.query.device),
            step.page_table,
            step.lengths.to(torch.uint32),
            step.case.tokens,
            bmm1_scale=step.scaling,
            bmm2_scale=1.0,
            out=torch.empty_like(step.query),
            kv_layout="HND",
        )

    yield KernelConfiguration(prepare)


KERNELS = (
    *(Kernel(storage, storage, _shipped, 4e-3, with_new=True) for storage in STORAGES),
    Kernel("flashinfer fp8", "fp8", _flashinfer, 3e-2, library="flashinfer"),
    Kernel("flashinfer xqa fp8", "fp8", _flashinfer_xqa, 1e-1, library="flashinfer"),
    Kernel("flashinfer bf16", "bf16", _flashinfer, 1e-2, library="flashinfer"),
    Kernel("flashinfer xqa bf16", "bf16", _flashinfer_xqa, 1e-2, library="flashinfer"),
    Kernel("sdpa bf16", "bf16", _sdpa, 1e-2, extra_copies=2, library="torch", ragged=False),
)
"""All kernels. Kernels that round weights to FP8 get a tolerance of a few FP8 steps (1/16)."""
