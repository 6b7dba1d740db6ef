"""Stored data of decode steps of backend=torch, tested on a CPU.

On a GPU, DecodePass.run replays a captured graph. On a CPU it performs the launches that a capture would record, here in
plain torch (the kernels' reference).
"""

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from kernel_engine_cases import GUARDED, decode_by_reference, distance, prefill_by_reference, short_model
from onnx_fixtures import static_scales

from stages.core.errors import UserError
from stages.engines.cuda.engine import KernelEngine, plan_pass
from stages.engines.reference.model import shape_for


@pytest.fixture(scope="module")
def model() -> Any:
    return short_model()


@pytest.fixture
def engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> KernelEngine:
    prefill_by_reference(monkeypatch)
    decode_by_reference(monkeypatch)
    return KernelEngine.from_model(model, GUARDED, static_scales(GUARDED, shape_for(model, GUARDED)))


def stored(engine: KernelEngine) -> list[np.ndarray]:
    """Return a copy of all bytes in the cache."""
    tensors = [tensor for group in engine.cache.groups for tensor in (group.paged | group.exact).values()]
    return [tensor.view(torch.uint8).numpy().copy() for tensor in tensors]


def changed(before: list[np.ndarray], after: list[np.ndarray]) -> bool:
    return any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("token", [7, 8])
def test_a_refused_step_stores_nothing_of_any_of_its_sequences(token: int, engine: KernelEngine) -> None:
    """Decode token 7, whose embedding is NaN, in the last row of a batch padded to four, or a sound token."""
    handles, _ = engine.prefill([[1] * 62, [2] * 5, [3]])
    before = stored(engine)
    engine.model = copy.deepcopy(engine.model)
    with torch.no_grad():
        engine.model.model.embed_tokens.weight[7] = torch.nan
    refused = pytest.raises(UserError, match=rf"key of layer 0, token 1 of sequence {handles[2]} is not finite")
    with refused if token == 7 else nullcontext():
        engine.decode(handles, [4, 5, token])
    assert changed(before, stored(engine)) is (token != 7)
    assert engine.memory().live_tokens == (68 if token == 7 else 71)


def test_a_model_in_bfloat16_stores_what_its_type_gives_and_decodes_within_its_rounding(
    model: Any, engine: KernelEngine
) -> None:
    half = KernelEngine.from_model(copy.deepcopy(model).bfloat16(), GUARDED, static_scales(GUARDED, shape_for(model, GUARDED)))
    prompts = [list(range(10, 72)), [2] * 5]
    (same, first), (handles, rows) = engine.prefill(prompts), half.prefill(prompts)
    assert rows.dtype == np.float32
    assert 1e-4 < distance(rows, first) < 3e-2
    step = half.decode(handles, [4, 5])
    assert 1e-4 < distance(step, engine.decode(same, [4, 5])) < 3e-2
    assert {x.dtype for p in half._passes.values() for x in (p.keys, p.values)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("left", "passes"),
    [
        ([], []),
        ([3], [[(0, 3)]]),
        ([9, 2, 3], [[(0, 4), (1, 2)], [(0, 4)], [(0, 1), (2, 3)]]),
        ([12, 4], [[(0, 4)], [(0, 4)], [(0, 4)], [(1, 4)]]),
        ([8, 1, 1], [[(1, 1), (2, 1), (0, 4)], [(0, 4)]]),
    ],
)
def test_prompts_are_cut_into_their_own_chunks_and_single_tokens_come_first(
    left: list[int], passes: list[list[tuple[int, int]]]
) -> None:
    planned = []
    while any(left):
        numbers = [i for i, tokens in enumerate(left) if tokens]
        planned.append([(numbers[i], size) for i, size in plan_pass([left[i] for i in numbers], 4, 6)])
        for i, size in planned[-1]:
            left[i] -= size
    assert planned == passes
