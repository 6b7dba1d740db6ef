"""The kernels of decode_attention.py: kvgate's as shipped, and as peers torch's SDPA, FlashInfer and vLLM, where installed.

FlashInfer reads kvgate's pools as they are (its layout HND), vLLM as a view with tokens before heads. Calls follow the
signatures of FlashInfer 0.6.18 and vLLM 0.32.0.

Shapes: B sequences of at most T tokens, N pages, P pages of a sequence, H KV heads in groups of G query heads, Hq = H * G, D
head_dim.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_cases import STORAGES
from benchmarks.attention_step import FILL_PAGES, Candidate, Kernel, Step
from plugins.kv_attention import launch, reference
from plugins.kv_attention.layout import PAGE_TOKENS

WORKSPACE_BYTES = 512 << 20
"""FlashInfer's workspace, for the partial sums of its splits; XQA's must be zero at first."""

SEGMENTS = 16
"""Splits of each sequence by vLLM's Triton kernel, as its backend has them on a GPU that it has no other number for."""

TURBOQUANT = {"mse_bits": 0, "value_quant_bits": 4, "key_fp8": True}
"""vLLM's turboquant_k8v4: FP8 keys without a scale, values of 4 bits with a scale and a zero a token."""


def _shipped(step: Step) -> Iterator[Candidate]:
    """kvgate's launch, with the work list that a step makes once for all its layers."""
    programs = launch.default_programs(step.layout, step.query, step.page_table, step.scaling)
    plan = launch.plan_decode(step.layout, step.lengths, programs=programs)
    inputs = (step.layout, step.query, step.key_new, step.value_new, step.cache, step.page_table, step.lengths, plan)
    run = partial(launch.decode_attention, *inputs, scaling=step.scaling)
    yield Candidate(lambda: run, f"programs {programs}")


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

    yield Candidate(lambda: grouped, "grouped heads")
    yield Candidate(lambda: as_rows, "heads as rows")


def _wrapper(step: Step, tensor_cores: bool, backend: str, query: Tensor, *scales: Tensor) -> Callable[[], Tensor]:
    """Plan FlashInfer's batch decode over the pages of every sequence, and return the run."""
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
        q_data_type=query.dtype,
        kv_data_type=pools[0].dtype,
        o_data_type=torch.bfloat16,
        sm_scale=step.scaling,
    )
    return partial(wrapper.run, query, pools, *scales)


def _flashinfer(step: Step) -> Iterator[Candidate]:
    """FlashInfer's batch decode wrapper with its kernels for bfloat16 queries. FA3 has none over an FP8 cache."""
    backends = ((True, "fa2"), (False, "auto")) if step.storage == "fp8" else ((True, "fa2"), (True, "fa3"), (False, "auto"))
    for tensor_cores, backend in backends:
        prepare = partial(_wrapper, step, tensor_cores, backend, step.query)
        yield Candidate(prepare, f"{backend}{', tensor cores' * tensor_cores}")


def _flashinfer_fp8_query(step: Step) -> Iterator[Candidate]:
    """FlashInfer's FA3 over FP8, which takes an FP8 query; rounding it is not timed."""
    case = step.case
    scales = (torch.ones(heads, device=step.query.device) for heads in (case.q_heads, case.kv_heads, case.kv_heads))
    query = step.query.to(torch.float8_e4m3fn)
    yield Candidate(partial(_wrapper, step, True, "fa3", query, *scales), "fa3")


def _flashinfer_xqa(step: Step) -> Iterator[Candidate]:
    """FlashInfer's choice by GPU: XQA, and on compute capability 10 trtllm-gen."""
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

    yield Candidate(prepare)


def _token_major(step: Step) -> tuple[Tensor, Tensor]:
    """The pools as views (N, 64, H, D)."""
    return step.cache["key_pool"].transpose(1, 2), step.cache["value_pool"].transpose(1, 2)


def _descale(step: Step) -> Tensor:
    """Scales of 1, (B, H), as vLLM passes those of a tensor."""
    return torch.ones(1, device=step.query.device).expand(step.case.batch, step.case.kv_heads)


def _starts(step: Step) -> Tensor:
    """First query of each sequence, and their number: one each."""
    return torch.arange(step.case.batch + 1, dtype=torch.int32, device=step.query.device)


def _vllm_triton(step: Step) -> Iterator[Candidate]:
    """vLLM's Triton attention, with a sequence in segments and in one piece: it chooses by the number of sequences."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    case, keys_values = step.case, _token_major(step)
    quantized = step.storage == "fp8"

    def prepare(segments: int | None) -> Callable[[], Tensor]:
        out = torch.empty_like(step.query)
        partials = {}
        if segments is not None:
            heads = (case.batch, case.q_heads, segments)
            sizes = {"output": (*heads, case.head_dim), "max": heads, "expsum": heads}
            partials = {
                f"softmax_segm_{name}": torch.empty(size, dtype=torch.float32, device=out.device)
                for name, size in sizes.items()
            }

        def run() -> Tensor:
            unified_attention(
                q=step.query,
                k=keys_values[0],
                v=keys_values[1],
                out=out,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=step.lengths,
                max_seqlen_k=case.tokens,
                softmax_scale=step.scaling,
                causal=True,
                window_size=(-1, -1),
                block_table=step.page_table,
                softcap=0.0,
                q_descale=None,
                k_descale=descale,
                v_descale=descale,
                seq_threshold_3D=None if segments is None else case.batch,
                num_par_softmax_segments=segments,
                kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if quantized else KVQuantMode.NONE,
                **partials,
            )
            return out

        starts, descale = _starts(step), _descale(step)
        return run

    for segments in (SEGMENTS, None):
        yield Candidate(partial(prepare, segments), f"segments {segments}")


def _vllm_flash(step: Step) -> Iterator[Candidate]:
    """vLLM's FlashAttention 3. Over FP8 it takes an FP8 query; rounding it is not timed."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    keys, values = _token_major(step)
    quantized = step.storage == "fp8"
    descale = _descale(step) if quantized else None

    def prepare() -> Callable[[], Tensor]:
        return partial(
            flash_attn_varlen_func,
            q=step.query.to(torch.float8_e4m3fn) if quantized else step.query,
            k=keys,
            v=values,
            max_seqlen_q=1,
            cu_seqlens_q=_starts(step),
            max_seqlen_k=step.case.tokens,
            seqused_k=step.lengths,
            softmax_scale=step.scaling,
            causal=True,
            block_table=step.page_table,
            out=torch.empty_like(step.query),
            q_descale=descale,
            k_descale=descale,
            v_descale=descale,
            fa_version=3,
        )

    yield Candidate(prepare)


def _vllm_turboquant(step: Step) -> Iterator[Candidate]:
    """vLLM's own cache of FP8 keys and 4-bit values, filled by its own kernel from the numbers of kvgate's."""
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention
    from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

    case, device = step.case, step.query.device
    # A token and head: the keys' bytes, the values' half bytes, and a float16 scale and zero.
    slot = case.head_dim + case.head_dim // 2 + 4
    form: dict[str, Any] = {"key_packed_size": case.head_dim, **TURBOQUANT}

    def prepare() -> Callable[[], Tensor]:
        nothing = torch.zeros(1, device=device)
        cache = torch.zeros(len(step.pages), PAGE_TOKENS, case.kv_heads, slot, dtype=torch.uint8, device=device)
        for first in range(0, len(step.pages), FILL_PAGES):
            pages = torch.arange(first, min(first + FILL_PAGES, len(step.pages)), device=device)
            tokens = len(pages) * PAGE_TOKENS
            keys, values = reference.dequantize(step.layout, step.cache, pages, tokens)
            slots = first * PAGE_TOKENS + torch.arange(tokens, device=device)
            pair = (x.transpose(0, 1).bfloat16().contiguous() for x in (keys, values))
            triton_turboquant_store(*pair, cache, slots.int(), nothing, nothing, **form)
        return partial(
            triton_turboquant_decode_attention,
            query=step.query,
            kv_cache=cache,
            block_table=step.page_table,
            seq_lens=step.lengths,
            Pi=nothing,
            centroids=nothing,
            scale=step.scaling,
            **form,
        )

    yield Candidate(prepare)


KERNELS = (
    *(Kernel(storage, storage, _shipped, 4e-3, with_new=True) for storage in STORAGES),
    Kernel("flashinfer fp8", "fp8", _flashinfer, 3e-2, library="flashinfer"),
    Kernel("flashinfer fp8 query", "fp8", _flashinfer_fp8_query, 1e-1, library="flashinfer"),
    Kernel("flashinfer xqa fp8", "fp8", _flashinfer_xqa, 1e-1, library="flashinfer"),
    Kernel("vllm triton fp8", "fp8", _vllm_triton, 3e-2, library="vllm"),
    Kernel("vllm fa3 fp8", "fp8", _vllm_flash, 1e-1, library="vllm"),
    Kernel("vllm turboquant", "fp8k_int4v", _vllm_turboquant, 2e-1, extra_copies=1, library="vllm"),
    Kernel("flashinfer bf16", "bf16", _flashinfer, 1e-2, library="flashinfer"),
    Kernel("flashinfer xqa bf16", "bf16", _flashinfer_xqa, 1e-2, library="flashinfer"),
    Kernel("vllm triton bf16", "bf16", _vllm_triton, 1e-2, library="vllm"),
    Kernel("vllm fa3 bf16", "bf16", _vllm_flash, 1e-2, library="vllm"),
    Kernel("sdpa bf16", "bf16", _sdpa, 1e-2, extra_copies=2, library="torch", ragged=False),
)
"""Kernels that round queries or weights to FP8 may be off by a few of its steps of 1/16. TurboQuant rounds values again, which
are held to 4 bits already."""
