"""Refused launches, and the work list of a decode step: every page is read once, and all parts are joined."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.kernels.cases import DEVICE, case_of, on_device, side
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plugins.kv_attention import launch
from plugins.kv_attention.layout import PAGE_TOKENS, CacheLayout


def plan_of(lengths: Sequence[int], programs: int, exact: tuple[int, int] = (0, 0)) -> tuple[list[list[int]], ...]:
    """Return the rows of the work list, and of the sequences."""
    layout = CacheLayout(1, 64, side("fp16"), side("fp16"), *exact)
    plan = launch.plan_decode(layout, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), programs=programs)
    return tuple(rows.tolist() for rows in plan)


@settings(max_examples=15, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 20_000)), min_size=1, max_size=40),
    programs=st.integers(1, 150),
    exact=st.sampled_from([(0, 0), (4, 60), (70, 0), (0, 65)]),
)
def test_every_page_is_read_once_and_every_part_is_joined(lengths: list[int], programs: int, exact: tuple[int, int]) -> None:
    work, sequences = plan_of(lengths, programs, exact)
    sink, recent = exact
    reads: Counter[tuple[int, int]] = Counter()
    parts_of: list[list[int]] = [[] for _ in lengths]
    for first, stop, low, high, part in work:
        for b in range(first, stop):
            begin, end, _, _ = sequences[b]
            assert low < high
            reads.update((b, page - begin + sink // PAGE_TOKENS) for page in range(max(low, begin), min(high, end)))
            parts_of[b].append(part + (b - first) * (2 if sum(exact) else 1))
        if stop == first:
            parts_of[first].insert(0, part)
    for b, (length, (_, _, first, parts)) in enumerate(zip(lengths, sequences, strict=True)):
        assert parts_of[b] == list(range(first, first + parts))
        pages_read = {page for owner, page in reads if owner == b}
        assert pages_read >= {position // PAGE_TOKENS for position in range(sink, max(sink, length - recent))}
        assert len(pages_read) <= max(1, -(-length // PAGE_TOKENS))
    assert set(reads.values()) == {1}
    every = [number for numbers in parts_of for number in numbers]
    assert len(set(every)) == len(every)
    assert max(every) < len(work) + len(lengths)


def shifted(x: Tensor) -> Tensor:
    """Return an equal contiguous tensor that starts one element after an aligned address."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


WRONG: dict[str, tuple[str, Callable[[Tensor], Any], str]] = {
    "strides": ("value_pool", lambda x: x.mT.contiguous().mT, "value_pool must be int8 .*, contiguous .*; got int8 .* strides"),
    "type": ("page_table", Tensor.long, r"page_table must be int32 on .*; got int64"),
    "new type": ("value_new", Tensor.half, r"value_new must be float32 on .*; got float16"),
    "address": ("value_pool", shifted, r"value_pool must be .* a pool at a multiple of 16 bytes; got .*, address 0x\w+"),
    "device": ("lengths", lambda x: x.to("meta"), rf"lengths must be int32 on {DEVICE}.*; got int32 on meta"),
    "rows": ("page_table", lambda x: x[:1], r"(page_table|lengths) must be \(.*\), got \(.*\)"),
    "heads": ("value_new", lambda x: x[..., :1, :], r"value_new must be \(.*2, 2, 64\), got \(.*2, 1, 64\)"),
    "absent": ("value_exact", lambda _: None, r"must have the tensors .*value_exact.*; got"),
}


@pytest.mark.parametrize("operation", ["append", "decode_attention", "context_attention"])
@pytest.mark.parametrize("wrong", WRONG)
def test_mismatched_tensors_are_refused_before_any_write(operation: str, wrong: str) -> None:
    """The layout has static and dynamic scales, and exact tokens."""
    name, change, message = WRONG[wrong]
    case = case_of("int8 tensor", "int4 32", 2, 64, [65, 1], sink=1, recent=2, dtype=torch.float32)
    cache, step = on_device(case.cache), on_device(case.step)
    options: dict[str, Any] = {"scaling": 0.1}
    if operation == "append":
        cache = {key: tensor[None] for key, tensor in cache.items()}
        step |= {key: step[key][None] for key in ("key_new", "value_new")}
        del step["query"], options["scaling"]
    elif operation == "decode_attention":
        options["plan"] = launch.plan_decode(case.layout, step["lengths"], programs=2)
    before = {key: tensor.clone() for key, tensor in cache.items()}
    arguments = {key: change(tensor) if key == name else tensor for key, tensor in (cache | step).items()}
    changed = {key: arguments[key] for key in cache if arguments[key] is not None}
    with pytest.raises(ValueError, match=message):
        getattr(launch, operation)(case.layout, cache=changed, **{key: arguments[key] for key in step}, **options)
    for key, tensor in before.items():
        assert torch.equal(cache[key].view(torch.uint8), tensor.view(torch.uint8)), key


def test_too_many_layers_and_invalid_plans_are_refused() -> None:
    case = case_of("int8 tensor", "int4 32", 2, 64, [65, 1])
    step = on_device(case.step)
    new = {name: step[name].repeat(2, 1, 1, 1) for name in ("key_new", "value_new")}
    tables = {name: step[name] for name in ("page_table", "lengths")}
    with pytest.raises(ValueError, match=r"key_pool must be \(2, N, 2, 64, 64\), got \(1, 7, 2, 64, 64\)"):
        launch.append(case.layout, cache={name: x[None] for name, x in on_device(case.cache).items()}, **new, **tables)
    for lengths, programs, message in (
        (torch.zeros(2, 1).int(), 1, r"lengths must be \(B\), got \(2, 1\)"),
        (torch.zeros(2).int(), 0, "programs must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            launch.plan_decode(case.layout, lengths, programs=programs)
