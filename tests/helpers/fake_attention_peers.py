"""FlashInfer and vLLM as far as the benchmark calls them: their recorded signatures over plain attention in torch.

Every function binds its arguments to the signature that its library has, checks shapes and types that it checks, and attends to
the pages, tokens and layout that the arguments mean. So a call that means something else gives a wrong output.
"""

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

FACTS = Path(__file__).resolve().parents[1] / "contract" / "facts" / "attention-peers.json"
SIGNATURES: dict[str, dict[str, Any]] = json.loads(FACTS.read_text(encoding="utf-8"))


def signature(name: str) -> inspect.Signature:
    """Return a recorded signature; defaults that are not literals are None."""
    recorded = next(library["signatures"][name] for library in SIGNATURES.values() if name in library["signatures"])
    return inspect.signature(eval(f"lambda {recorded}: None"))


def recorded_parameters(source: str, name: str) -> str:
    """Return the parameters of `Class.method` or `function` in a source, without types: how the facts were recorded."""
    nodes: list[Any] = ast.parse(source).body
    *owners, function_name = name.split(".")
    for owner in owners:
        nodes = next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == owner).body
    # Of overloads the last one is the function.
    function = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == function_name][-1]
    arguments = function.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None
    literal = (ast.Constant, ast.UnaryOp)
    arguments.defaults = [each if isinstance(each, literal) else ast.Constant(None) for each in arguments.defaults]
    arguments.kw_defaults = [each if isinstance(each, literal) else ast.Constant(None) for each in arguments.kw_defaults]
    return ast.unparse(arguments)


def bound(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments by name, as the library's function gets them."""
    arguments = signature(name).bind(*args, **kwargs)
    arguments.apply_defaults()
    return dict(arguments.arguments)


def attend(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attention of one token's query (Hq, D) over keys and values (T, H, D), in float32."""
    group = len(query) // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    weights = torch.einsum("hd,thd->ht", query.float(), keys).mul(scaling).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values)


def over_pages(
    query: Tensor, pools: Iterable[Tensor], tables: Iterable[Tensor], lengths: Iterable[int], scaling: float
) -> Tensor:
    """Attention of queries (B, Hq, D) over pools (N, 64, H, D); tables: the pages of each sequence."""
    pools = list(pools)
    out = []
    for row, table, length in zip(query, tables, lengths, strict=True):
        pages = table[: -(-length // pools[0].shape[1])].long()
        keys, values = (pool[pages].flatten(0, 1)[:length] for pool in pools)
        out.append(attend(row, keys, values, scaling))
    return torch.stack(out).bfloat16()


class Wrapper:
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bound("BatchDecodeWithPagedKVCacheWrapper.__init__", self, *args, **kwargs)
        assert given["kv_layout"] == "HND"
        assert given["float_workspace_buffer"].dtype == torch.uint8
        self.backend, self.tensor_cores = given["backend"], given["use_tensor_cores"]

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = bound("BatchDecodeWithPagedKVCacheWrapper.plan", self, *args, **kwargs)
        assert given["deprecated_positional_args"] == ()
        positional = [given[name] for name in list(given)[1:8]]
        self.planned = bound("BatchDecodeWithPagedKVCacheWrapper._plan_impl", self, *positional, **given["kwargs"])

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        given, plan = bound("BatchDecodeWithPagedKVCacheWrapper.run", self, *args, **kwargs), self.planned
        query, pools = given["q"], given["paged_kv_cache"]
        assert (query.dtype, pools[0].dtype, plan["o_data_type"]) == (plan["q_data_type"], plan["kv_data_type"], torch.bfloat16)
        assert given["v_scale"] in (None, 1.0), "another scale is applied by a kernel of its own"
        if query.dtype == torch.float8_e4m3fn:
            assert self.backend == "fa3"
            assert [scale.shape for scale in given["args"]] == [(query.shape[1],), (pools[0].shape[1],), (pools[0].shape[1],)]
        starts, page = plan["indptr"].tolist(), plan["page_size"]
        assert plan["indptr"].dtype == plan["indices"].dtype == plan["last_page_len"].dtype == torch.int32
        assert len(plan["indices"]) == starts[-1]
        tables = [plan["indices"][first:last] for first, last in pairwise(starts)]
        lengths = [(len(table) - 1) * page + last for table, last in zip(tables, plan["last_page_len"].tolist(), strict=True)]
        assert query.shape[1:] == (plan["num_qo_heads"], plan["head_dim"])
        assert pools[0].shape[1:] == (plan["num_kv_heads"], page, plan["head_dim"])
        return over_pages(query, (pool.transpose(1, 2) for pool in pools), tables, lengths, plan["sm_scale"])


def trtllm_batch_decode(*args: Any, **kwargs: Any) -> Tensor:
    given = bound("trtllm_batch_decode_with_kv_cache", *args, **kwargs)
    assert given["kv_layout"] == "HND"
    assert (given["block_tables"].dtype, given["seq_lens"].dtype) == (torch.int32, torch.uint32)
    assert not given["workspace_buffer"].any(), "XQA's semaphores begin at zero"
    lengths = given["seq_lens"].tolist()
    assert given["max_seq_len"] >= max(lengths)
    assert given["bmm2_scale"] == 1.0
    pools = (pool.transpose(1, 2) for pool in given["kv_cache"])
    out: Tensor = given["out"]
    return out.copy_(over_pages(given["query"], pools, given["block_tables"], lengths, given["bmm1_scale"]))


def unified_attention(*args: Any, **kwargs: Any) -> None:
    given = bound("unified_attention", *args, **kwargs)
    _checked_starts(given)
    quantized = given["k"].dtype == torch.float8_e4m3fn
    assert given["kv_quant_mode"] == (1 if quantized else 0)
    assert given["k_descale"].shape == given["v_descale"].shape == (len(given["q"]), given["k"].shape[2])
    if given["seq_threshold_3D"] is not None:
        shape = (given["seq_threshold_3D"], given["q"].shape[1], given["num_par_softmax_segments"])
        assert given["softmax_segm_output"].shape == (*shape, given["q"].shape[2])
        assert given["softmax_segm_max"].shape == given["softmax_segm_expsum"].shape == shape
    pools, lengths = (given["k"], given["v"]), given["seqused_k"].tolist()
    given["out"].copy_(over_pages(given["q"], pools, given["block_table"], lengths, given["softmax_scale"]))


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> Tensor:
    given = bound("flash_attn_varlen_func", *args, **kwargs)
    _checked_starts(given)
    assert given["q"].dtype == given["k"].dtype == given["v"].dtype, "FlashAttention 3 takes one type"
    if given["q"].dtype == torch.float8_e4m3fn:
        assert {given[name].shape for name in ("q_descale", "k_descale", "v_descale")} == {
            (len(given["q"]), given["k"].shape[2])
        }
    pools, lengths = (given["k"], given["v"]), given["seqused_k"].tolist()
    out: Tensor = given["out"]
    return out.copy_(over_pages(given["q"], pools, given["block_table"], lengths, given["softmax_scale"]))


def _checked_starts(given: dict[str, Any]) -> None:
    assert given["cu_seqlens_q"].tolist() == list(range(len(given["q"]) + 1))
    assert given["max_seqlen_q"] == 1
    assert given["max_seqlen_k"] >= int(given["seqused_k"].max())
    assert given["k"].stride(-1) == 1


def turboquant_store(*args: Any, **kwargs: Any) -> None:
    """Store a slot as vLLM's kernel does: E4M3 keys, values of 4 bits, their scale and their smallest."""
    given = bound("triton_turboquant_store", *args, **kwargs)
    cache, keys, values = given["kv_cache"], given["key"], given["value"]
    dim = keys.shape[2]
    assert (given["key_fp8"], given["value_quant_bits"], given["key_packed_size"]) == (True, 4, dim)
    assert cache.shape[3] == dim + dim // 2 + 4
    scale = (values.amax(-1) - values.amin(-1)).float() / 15
    codes = ((values.float() - values.amin(-1, keepdim=True).float()) / scale[..., None] + 0.5).int().clamp(0, 15)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    affine = torch.stack([scale, values.amin(-1).float()], -1).half().view(torch.uint8)
    slots = given["slot_mapping"].long()
    assert given["slot_mapping"].dtype == torch.int32
    row = torch.cat([keys.to(torch.float8_e4m3fn).view(torch.uint8), packed, affine], -1)
    cache.view(-1, *cache.shape[2:])[slots] = row


def turboquant_decode(*args: Any, **kwargs: Any) -> Tensor:
    given = bound("triton_turboquant_decode_attention", *args, **kwargs)
    cache, dim = given["kv_cache"], given["query"].shape[2]
    assert (given["key_fp8"], given["mse_bits"], given["value_quant_bits"]) == (True, 0, 4)
    keys = cache[..., :dim].contiguous().view(torch.float8_e4m3fn).float()
    packed = cache[..., dim : dim + dim // 2].int()
    scale, zero = cache[..., dim + dim // 2 :].contiguous().view(torch.float16).float().split(1, -1)
    values = torch.stack([packed & 15, packed >> 4], -1).flatten(-2) * scale + zero
    return over_pages(given["query"], (keys, values), given["block_table"], given["seq_lens"].tolist(), given["scale"])


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make both libraries importable."""
    members: dict[str, dict[str, Callable[..., Any] | Any]] = {
        "flashinfer": {"BatchDecodeWithPagedKVCacheWrapper": Wrapper},
        "flashinfer.decode": {"trtllm_batch_decode_with_kv_cache": trtllm_batch_decode},
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.ops": {},
        "vllm.v1.attention.ops.triton_unified_attention": {"unified_attention": unified_attention},
        "vllm.v1.attention.ops.triton_turboquant_store": {"triton_turboquant_store": turboquant_store},
        "vllm.v1.attention.ops.triton_turboquant_decode": {"triton_turboquant_decode_attention": turboquant_decode},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": type("KVQuantMode", (), SIGNATURES["vllm"]["KVQuantMode"])},
        "vllm.vllm_flash_attn": {"flash_attn_varlen_func": flash_attn_varlen_func},
    }
    for name, content in members.items():
        module = ModuleType(name)
        module.__dict__.update(content, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("benchmarks.attention_kernels.find_spec", lambda _: True)
