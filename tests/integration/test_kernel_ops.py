"""kvgate::decode_attention and kvgate::append as torch operators: their declaration, tracing, and refusal of wrong tensors.

On a GPU, or on a CPU in Triton's interpreter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, Case, on_device, side
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from plugins.kv_attention import launch, ops
from plugins.kv_attention.layout import CacheLayout

torch.set_num_threads(1)

LAYERS = 2
EVERYTHING = CacheLayout(2, 64, side("int8 tensor"), side("int4 32"), sink_tokens=1, recent_tokens=2)
"""Static and dynamic scales and exact tokens, without float8: opcheck compares tensors, which float8 does not support."""
FP8 = CacheLayout(2, 64, side("fp8_e4m3 head"), side("fp8_e4m3 token"))


def arguments(layout: CacheLayout) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the positional and named arguments of an append to zeroed caches of two sequences, in all layers."""
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


def of_one_layer(append: tuple[tuple[Tensor, ...], dict[str, Any]]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the arguments of an attention in the first layer of an append's cache, with two query heads per KV head."""
    (key, value, *tables), cache = append
    shared = ("exact_slots", "sink_tokens")
    one = {name: x if name in shared else x[0] for name, x in cache.items()}
    return (key[0].repeat_interleave(2, 1), key[0], value[0], *tables), one | {"scaling": 0.125}


def test_what_is_declared_is_what_the_operators_do() -> None:
    torch.library.opcheck(torch.ops.kvgate.append.default, *arguments(EVERYTHING))
    torch.library.opcheck(torch.ops.kvgate.decode_attention.default, *of_one_layer(arguments(EVERYTHING)))
    torch.library.opcheck(torch.ops.kvgate.plan.default, (torch.tensor([65, 0], dtype=torch.int32, device=DEVICE), 3, 1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_is_the_references(dtype: torch.dtype) -> None:
    case = Case(CacheLayout(2, 64, side("fp8_e4m3 head"), side("int4 32"), 3, 20), [70, 0, 1], group=3, dtype=dtype)
    step = on_device({"query": case.query, "key_new": case.key_new, "value_new": case.value_new})
    out = ops.decode_attention(**step, **on_device(case.tables), **on_device(case.cache), sink_tokens=3, scaling=0.125)
    expected = case.expected(0.125)
    assert out.dtype == dtype
    assert (out.float().cpu() - expected).norm() < (2e-3 if dtype == torch.float32 else 4e-3) * expected.norm()


def test_layers_share_the_work_list_of_a_step() -> None:
    case = Case(CacheLayout(2, 64, side("fp8_e4m3 head"), side("int4 32"), 3, 20), [270, 0, 1], group=2)
    step = on_device({"query": case.query, "key_new": case.key_new, "value_new": case.value_new} | case.tables | case.cache)
    alone = ops.decode_attention(**step, sink_tokens=3, scaling=0.125)
    programs = ops.default_programs(case.layout, step["query"], step["page_table"], 0.125)
    work, sequences = ops.plan(step["lengths"], programs, 3, 20)
    assert torch.equal(ops.decode_attention(**step, sink_tokens=3, scaling=0.125, work=work, sequences=sequences), alone)


class Step(torch.nn.Module):
    """A decoder's use of its cache: attend, then append."""

    def forward(
        self, appended: dict[str, Any], attended: dict[str, Any], new: tuple[Tensor, ...], query: tuple[Tensor, ...]
    ) -> Tensor:
        out = torch.ops.kvgate.decode_attention(*query, **attended)
        torch.ops.kvgate.append(*new, **appended)
        doubled: Tensor = out * 2
        return doubled


def test_an_exported_program_holds_both_operators_and_runs_them() -> None:
    def inputs() -> tuple[Any, ...]:
        new, cache = arguments(FP8)
        query, one = of_one_layer((new, cache))
        return cache, one, new, query

    program = torch.export.export(Step(), inputs())
    targets = [str(node.target) for node in program.graph.nodes if "kvgate" in str(node.target)]
    assert targets == ["kvgate.decode_attention.default", "kvgate.append.default"]
    exported, eager = inputs(), inputs()
    torch.testing.assert_close(program.module()(*exported), Step()(*eager), rtol=0, atol=0)
    for name, tensor in eager[0].items():
        assert torch.equal(exported[0][name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert exported[0]["value_pool"].float().abs().sum() > 0


def test_the_output_has_the_querys_shape_and_type_before_anything_runs() -> None:
    (query, *rest), cache = of_one_layer(arguments(FP8))
    query = query.bfloat16()
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in cache.items()}
        out = torch.ops.kvgate.decode_attention(mode.from_tensor(query), *map(mode.from_tensor, rest), **fake)
    assert (out.shape, out.dtype, out.device.type) == ((2, 4, 64), torch.bfloat16, DEVICE)


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8 head", "fp8_e4m3 token", "int4 64", "nvfp4 16"])
def test_the_format_is_read_from_the_tensors(name: str) -> None:
    key = side("fp16") if side(name).packed else side(name)
    layout = CacheLayout(2, 128, key, side(name), sink_tokens=2, recent_tokens=5)
    _, cache = arguments(layout)
    assert ops.layout_of(128, {n: x[0] for n, x in cache.items() if n not in ("exact_slots", "sink_tokens")}, 2) == layout


def spread(x: Tensor) -> Tensor:
    """Return the same numbers in every other element of memory."""
    return torch.stack([x, x], -1)[..., 0]


def shifted(x: Tensor) -> Tensor:
    """Return the same tensor, contiguous, one element behind an aligned address."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


WRONG: list[tuple[str, Callable[[Tensor], Any], str]] = [
    ("page_table", spread, r"page_table must be contiguous, got strides \(4, 2\) of shape \(2, 2\): make it so"),
    ("lengths", spread, r"lengths must be contiguous, got strides \(2,\)"),
    ("exact_slots", spread, r"exact_slots must be contiguous, got strides \(2,\)"),
    ("value_pool", lambda x: x.mT.contiguous().mT, "value_pool must be contiguous, got strides"),
    ("page_table", Tensor.long, r"page_table must be torch\.int32, got torch\.int64"),
    ("lengths", Tensor.long, r"lengths must be torch\.int32, got torch\.int64"),
    ("exact_slots", Tensor.long, r"exact_slots must be torch\.int32, got torch\.int64"),
    ("page_table", lambda x: x[:1], r"page_table must be \(2, P\), a row of every sequence, got \(1, 2\)"),
    ("lengths", lambda x: x[:1], r"lengths must be \(2,\), got \(1,\)"),
    ("exact_slots", lambda x: x.repeat(2), r"exact_slots must be \(2,\), got \(4,\)"),
    ("value_pool", shifted, r"value_pool must begin at a multiple of 16 bytes, got 0x\w+: clone\(\) it"),
    ("key_pool", shifted, r"key_pool must begin at a multiple of 16 bytes"),
    ("value_scale_pool", shifted, r"value_scale_pool must begin at a multiple of 16 bytes"),
    ("key_pool", Tensor.float, r"key_pool must be one of .*, got torch\.float32"),
    ("value_scale_pool", Tensor.bfloat16, r"value_scale_pool must be torch\.float16, got torch\.bfloat16"),
    ("value_pool", lambda x: x[..., :2, :, :, :].contiguous(), r"value_pool must be \(.*3, 2, 64, 32\), got \(.*2, 2, 64"),
    ("value_scale_pool", lambda x: x[..., :32, :].contiguous(), r"value_scale_pool must be \(.*3, 2, 64, 2\), got"),
    ("value_exact", lambda x: x[..., :1, :, :, :].contiguous(), r"value_exact must be \(.*2, 2, 3, 64\), got"),
    ("value_exact", lambda _: None, r"must be those of the layout; wanted and got: .*value_exact.* and"),
    ("key_exact", Tensor.float, r"key_exact must be torch\.float16, got torch\.float32"),
    ("key_scale", Tensor.double, r"key_scale must be torch\.float32, got torch\.float64"),
    ("key_scale", lambda x: x.repeat_interleave(3, -1), r"key_scale must be \(.*2,?\), got \(.*3,?\)"),
    ("value_pool", lambda x: x.flatten(-2), r"value_pool has the wrong number of dimensions"),
    ("value_new", lambda x: x[..., :1, :], r"value_new must be \(.*2, 2, 64\), got \(.*2, 1, 64\)"),
    ("key_new", Tensor.double, r"key_new must be one of torch\.float32, .*, got torch\.float64"),
]


@pytest.mark.parametrize("operator", ["append", "decode_attention"])
@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(WRONG)])
def test_tensors_that_the_kernels_would_misread_are_refused_and_nothing_is_written(
    operator: str, name: str, change: Any, message: str
) -> None:
    append = arguments(EVERYTHING)
    positional, cache = append if operator == "append" else of_one_layer(append)
    names = ("query", "key_new", "value_new", "page_table", "lengths")[-len(positional) :]
    named = dict(zip(names, positional, strict=True)) | cache
    before = {key: x.clone() for key, x in named.items() if isinstance(x, Tensor)}
    with pytest.raises(ValueError, match=message):
        getattr(ops, operator)(**(named | {name: change(named[name])}))
    for key, x in before.items():
        assert torch.equal(named[key].view(torch.uint8), x.view(torch.uint8)), key


def test_an_append_of_more_layers_than_the_cache_has_is_refused() -> None:
    (key, value, *tables), cache = arguments(FP8)
    with pytest.raises(ValueError, match=r"key_pool must be \(4, 3, 2, 64, 64\), got \(2, 3, 2, 64, 64\)"):
        ops.append(key.repeat(2, 1, 1, 1), value.repeat(2, 1, 1, 1), *tables, **cache)
    with pytest.raises(ValueError, match=r"key_pool must begin with the dimension of the layers"):
        ops.append(key, value, *tables, **(cache | {"key_pool": cache["key_pool"][:0]}))


def test_columns_of_a_wider_table_are_taken_once_they_are_contiguous() -> None:
    """A slice of columns is not contiguous: its rows would be read at the wrong stride."""
    (*step, table, lengths), cache = of_one_layer(arguments(EVERYTHING))
    wide = torch.cat([table, torch.full_like(table, 1 << 30)], 1)
    with pytest.raises(ValueError, match=r"page_table must be contiguous, got strides \(4, 1\)"):
        ops.decode_attention(*step, wide[:, :2], lengths, **cache)
    out = ops.decode_attention(*step, wide[:, :2].contiguous(), lengths, **cache)
    torch.testing.assert_close(out, ops.decode_attention(*step, table, lengths, **cache), rtol=0, atol=0)


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device. A stand-in of device_of records the device that is current at each launch."""
    current: list[torch.device] = []
    launches: list[tuple[str, list[torch.device]]] = []

    class Guard:
        def __init__(self, tensor: Tensor) -> None:
            self.device = tensor.device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_: object) -> None:
            current.pop()

    def spied(name: str) -> Any:
        def launch_of(*_: object, **__: object) -> None:
            launches.append((name, current.copy()))

        return type("Kernel", (), {"__getitem__": lambda *_: launch_of})()

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    kernels = ("decode_partial", "decode_reduce", "append_kernel")
    for name in kernels:
        monkeypatch.setattr(launch, name, spied(name))
    positional, named = arguments(FP8)
    step, cache = of_one_layer((positional, named))
    ops.decode_attention(*step, **cache)
    ops.append(*positional, **named)
    assert launches == [(name, [positional[0].device]) for name in kernels]
