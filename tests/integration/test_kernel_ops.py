"""kvgate::decode_attention and kvgate::append as operators of torch: declared rightly, traced, refused what is no cache.

On a GPU, or on a CPU in Triton's interpreter.
"""

from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, Case, on_device, side
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from plugins.kv_attention import ops
from plugins.kv_attention.layout import CacheLayout

torch.set_num_threads(1)

LAYERS = 2
EVERYTHING = CacheLayout(2, 64, side("int8 tensor"), side("int4 32"), sink_tokens=1, recent_tokens=2)
"""Static and dynamic scales, exact tokens. float8 has no comparison, which opcheck needs."""
FP8 = CacheLayout(2, 64, side("fp8_e4m3 head"), side("fp8_e4m3 token"))


def arguments(layout: CacheLayout) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Of an append to zeroed caches of two sequences, in all layers."""
    specs = layout.pools(3) | layout.exact_buffers(2) | layout.static_scales()
    cache: dict[str, Any] = {
        name: torch.zeros(LAYERS, *shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in specs.items()
    }
    for name in layout.static_scales():
        cache[name] += 0.02
    tables = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32), torch.tensor([65, 0], dtype=torch.int32)
    if layout.exact_tokens:
        cache |= {"exact_slots": torch.tensor([1, 0], dtype=torch.int32), "sink_tokens": layout.sink_tokens}
    new = torch.randn(2, LAYERS, 2, layout.kv_heads, layout.head_dim, generator=torch.Generator().manual_seed(0))
    placed = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in cache.items()}
    return tuple(x.to(DEVICE) for x in (*new, *tables)), placed


def of_one_layer(given: tuple[tuple[Tensor, ...], dict[str, Any]]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Of an attention in the first layer, by two query heads a KV head."""
    (key, value, *tables), cache = given
    shared = ("exact_slots", "sink_tokens")
    one = {name: x if name in shared else x[0] for name, x in cache.items()}
    return (key[0].repeat_interleave(2, 1), key[0], value[0], *tables), one | {"scaling": 0.125}


def test_what_is_declared_is_what_the_operators_do() -> None:
    torch.library.opcheck(torch.ops.kvgate.append.default, *arguments(EVERYTHING))
    torch.library.opcheck(torch.ops.kvgate.decode_attention.default, *of_one_layer(arguments(EVERYTHING)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_is_the_references(dtype: torch.dtype) -> None:
    case = Case(CacheLayout(2, 64, side("fp8_e4m3 head"), side("int4 32"), 3, 20), [70, 0, 1], group=3, dtype=dtype)
    step = on_device({"query": case.query, "key_new": case.key_new, "value_new": case.value_new})
    found = ops.decode_attention(
        **step, **on_device(case.tables), **on_device(case.cache), sink_tokens=3, scaling=0.125, splits=2
    )
    wanted = case.expected(0.125)
    assert found.dtype == dtype
    assert (found.float().cpu() - wanted).norm() < (2e-3 if dtype == torch.float32 else 4e-3) * wanted.norm()


class Step(torch.nn.Module):
    """What an exported decoder does with its cache."""

    def forward(
        self, appended: dict[str, Any], attended: dict[str, Any], new: tuple[Tensor, ...], query: tuple[Tensor, ...]
    ) -> Tensor:
        out = torch.ops.kvgate.decode_attention(*query, **attended)
        torch.ops.kvgate.append(*new, **appended)
        return out * 2


def test_an_exported_program_holds_both_operators_and_runs_them() -> None:
    def given() -> tuple[Any, ...]:
        new, cache = arguments(FP8)
        query, one = of_one_layer((new, cache))
        return cache, one, new, query

    program = torch.export.export(Step(), given())
    targets = [str(node.target) for node in program.graph.nodes if "kvgate" in str(node.target)]
    assert targets == ["kvgate.decode_attention.default", "kvgate.append.default"]
    ours, theirs = given(), given()
    torch.testing.assert_close(program.module()(*ours), Step()(*theirs), rtol=0, atol=0)
    for name, tensor in theirs[0].items():
        assert torch.equal(ours[0][name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert ours[0]["value_pool"].float().abs().sum() > 0


def test_the_output_has_the_querys_shape_and_type_before_anything_runs() -> None:
    (query, *rest), cache = of_one_layer(arguments(FP8))
    query = query.bfloat16()
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in cache.items()}
        out = torch.ops.kvgate.decode_attention(mode.from_tensor(query), *map(mode.from_tensor, rest), **fake)
    assert (out.shape, out.dtype, out.device.type) == ((2, 4, 64), torch.bfloat16, DEVICE)


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8 head", "fp8_e4m3 token", "int4 64"])
def test_the_format_is_read_from_the_tensors(name: str) -> None:
    key = side("fp16") if name.startswith("int4") else side(name)
    layout = CacheLayout(2, 128, key, side(name), sink_tokens=2, recent_tokens=5)
    _, cache = arguments(layout)
    assert ops.layout_of(128, {n: x[0] for n, x in cache.items() if n not in ("exact_slots", "sink_tokens")}, 2) == layout


def test_tensors_that_the_kernels_would_misread_are_refused() -> None:
    new, cache = arguments(FP8)
    with pytest.raises(ValueError, match="value_pool must be contiguous, got strides"):
        ops.append(*new, **(cache | {"value_pool": cache["value_pool"].mT}))
