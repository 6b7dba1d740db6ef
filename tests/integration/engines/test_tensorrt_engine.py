"""The engine over TensorRT plans: its pages, shapes and bindings, with TensorRT's runtime replaced by ONNX Runtime."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.engines.random_llama import BY_NAME, make_bundle
from helpers.tensorrt.fake import LIBRARY, FakeCudaEngine, FakeDevice, make_plans

from stages.core.errors import UserError
from stages.engines.base import Mode
from stages.engines.bundle import open_bundle
from stages.engines.onnx.bundle import GRAPH, NOT_FINITE
from stages.engines.onnx.engine import OnnxEngine
from stages.engines.onnx.engine import load_engine as load_onnx
from stages.engines.tensorrt.bundle import PLANS, PlanRecord
from stages.engines.tensorrt.engine import PlanEngine
from stages.engines.tensorrt.session import PlanStep

POLICIES = ["fp8k_int4v", "int8_asym", "ages"]
BATCH, TOKENS = 3, 320


class Pair:
    """A policy's ONNX engine, and the TensorRT engine of the same graphs on a fake runtime."""

    def __init__(self, onnx_bundle: Path, plans: Path) -> None:
        self.onnx_bundle, self.plans = onnx_bundle, plans
        self.record, self.policy, self.scales = open_bundle(plans, PlanRecord, "tensorrt_rtx")

    def onnx(self) -> OnnxEngine:
        # A plan has the graph's operators. With another order of sums, codes of new tokens would round to their neighbours.
        return load_onnx(self.onnx_bundle, threads=1, attention="graph")

    def tensorrt(self) -> tuple[PlanEngine, FakeDevice, dict[Mode, FakeCudaEngine]]:
        device = FakeDevice()
        engines = {mode: FakeCudaEngine(self.onnx_bundle / GRAPH, self.record, mode, self.policy) for mode in PLANS}
        return PlanEngine(self.plans, self.record, self.policy, self.scales, engines, LIBRARY, device), device, engines


@pytest.fixture(scope="module")
def pairs(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    root, pairs = tmp_path_factory.mktemp("plans"), {}
    for name in POLICIES:
        onnx_bundle = make_bundle(decoder, root / name, BY_NAME[name])
        with pytest.MonkeyPatch.context() as patch:
            # TensorRT's parsing of the graphs is real; test_tensorrt_rtx_plan.py builds the plans
            patch.setattr("stages.engines.tensorrt.build.build", lambda *_: b"plan")
            out = make_plans(onnx_bundle, root / f"{name}_plans", BY_NAME[name], max_batch=BATCH, max_tokens=TOKENS)
        pairs[name] = Pair(onnx_bundle, out)
    return pairs


def stored_bytes(engine: PlanEngine | OnnxEngine, handles: list[int]) -> list[dict[str, tuple[int, bytes]]]:
    stored = map(engine.pool.stored, handles)
    return [{name: (first, codes.tobytes()) for name, (first, codes) in arrays.items()} for arrays in stored]


@contextmanager
def patch_not_finite(*place: int) -> Iterator[None]:
    """Let the graphs report a key or value that is not finite at (sequence, row of all layers' sides and heads, token)."""
    read = PlanStep.read

    def broken(step: PlanStep) -> list[np.ndarray]:
        step.outputs[NOT_FINITE][place] = torch.nan
        return read(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanStep, "read", broken)
        yield


@pytest.mark.parametrize("name", POLICIES)
def test_steps_and_chunks_equal_those_of_onnx_runtime(name: str, pairs: dict[str, Pair]) -> None:
    """Compare with the ONNX engine.

    Covers chunks that begin within pages, windows that move within a run, padded rows and columns, and then corrupted scales,
    launched and replayed.
    """
    rng = np.random.default_rng(0)
    (engine, _, fakes), expected = pairs[name].tensorrt(), pairs[name].onnx()
    engine.prefill_chunk = expected.prefill_chunk = 100
    prompts = [rng.integers(0, 256, size).tolist() for size in (170, 95, 255)]
    (handles, logits), (expected_handles, expected_logits) = engine.prefill(prompts), expected.prefill(prompts)
    np.testing.assert_allclose(logits, expected_logits, atol=2e-4)
    assert stored_bytes(engine, handles) == stored_bytes(expected, expected_handles)
    contexts = fakes["prefill"].contexts
    assert {context.sizes["B"] for context in contexts} == {1}
    assert sum(context.runs for context in contexts) == 6, "100 and 70 tokens, 95, and 100, 100 and 55"
    for turn in range(8):
        for each_engine in (engine, expected):
            if turn == 3:
                each_engine.corrupt_key_scale(0.5)
            if turn == 5:
                each_engine.corrupt_key_scale(1.5)
        live = slice(0, 3 if turn < 6 else 2)
        tokens = rng.integers(0, 256, len(handles[live])).tolist()
        np.testing.assert_allclose(
            engine.decode(handles[live], tokens), expected.decode(expected_handles[live], tokens), atol=2e-4
        )
    assert stored_bytes(engine, handles) == stored_bytes(expected, expected_handles)


def test_a_refused_prompt_leaves_nothing_of_its_batch(pairs: dict[str, Pair]) -> None:
    engine, expected = pairs["fp8k_int4v"].tensorrt()[0], pairs["fp8k_int4v"].onnx()
    (live, _), (other, _) = engine.prefill([[3] * 80]), expected.prefill([[3] * 80])
    before, in_use, value = pool_bytes(engine), engine.pool.in_use, engine.shape.kv_heads
    message = "a value of layer 0 is not finite"
    with patch_not_finite(0, value, 6):
        with pytest.raises(UserError, match=message):
            engine.prefill([[2] * 7])
        assert same(before, pool_bytes(engine))
        with pytest.raises(UserError, match=message):
            engine.prefill([[1] * 5, [2] * 7])  # token 6 is padding of the first prompt
    assert engine.pool.in_use == in_use
    with patch_not_finite(0, value, 7):  # padding
        (handles, logits), (expected_handles, expected_logits) = (
            engine.prefill([[1] * 5, [2] * 7]),
            expected.prefill([[1] * 5, [2] * 7]),
        )
    np.testing.assert_allclose(logits, expected_logits, atol=2e-4)
    steps = engine.decode([*live, *handles], [4, 5, 6]), expected.decode([*other, *expected_handles], [4, 5, 6])
    np.testing.assert_allclose(*steps, atol=2e-4)


def test_each_decode_shape_is_captured_once_and_replayed(pairs: dict[str, Pair]) -> None:
    engine, device, fakes = pairs["int8_asym"].tensorrt()
    handles, _ = engine.prefill([[1] * 3, [2] * 5])
    for _ in range(10):
        engine.decode(handles, [1, 2])
    assert (len(fakes["decode"].contexts), device.captured, device.replayed) == (1, 1, 9)
    for _ in range(70):  # the second page, then the third, which is padded to four
        engine.decode(handles[:1], [3])
    captured = device.captured
    assert len(fakes["decode"].contexts) == 3  # one row with one page, then with two
    assert len(fakes["prefill"].contexts) == 2  # 3 tokens, padded to 4, and 5, padded to 8
    fakes["decode"].capturable = False  # a context of another shape is launched every time
    handles += engine.prefill([[1] * 3])[0]
    for _ in range(3):
        engine.decode(handles, [1, 2, 3])
    assert (fakes["decode"].contexts[-1].runs, device.captured) == (3, captured)


def pool_bytes(engine: PlanEngine) -> list[np.ndarray]:
    return [tensor.contiguous().view(torch.uint8).numpy().copy() for tensor in engine.pool.tensors.values()]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_refused_step_stores_nothing_and_the_next_one_goes_on(pairs: dict[str, Pair]) -> None:
    engine, expected = pairs["ages"].tensorrt()[0], pairs["ages"].onnx()
    prompts = [[3] * 192, [2] * 65]  # The next token begins a page and, in a window of older formats, another page.
    (handles, _), (expected_handles, _) = engine.prefill(prompts), expected.prefill(prompts)
    before = pool_bytes(engine)
    refused = pytest.raises(UserError, match="a value of layer 0 is not finite")
    with patch_not_finite(1, engine.shape.kv_heads), refused:
        engine.decode(handles, [7, 8])
    assert same(before, pool_bytes(engine))
    np.testing.assert_allclose(engine.decode(handles, [4, 5]), expected.decode(expected_handles, [4, 5]), atol=2e-4)


def test_a_gpu_without_room_names_the_keys_that_size_the_cache(pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("stages.engines.tensorrt.pool.torch.zeros", full)
    with pytest.raises(UserError, match=rf"^backend\.max_batch={BATCH}, backend\.max_tokens={TOKENS}: .*lower one of the two"):
        pairs["int8_asym"].tensorrt()


def test_exceeding_a_plans_limits_names_the_key(pairs: dict[str, Pair]) -> None:
    engine = pairs["int8_asym"].tensorrt()[0]
    with pytest.raises(UserError, match=rf"backend\.max_tokens={TOKENS}: a sequence would have 321 tokens"):
        engine.prefill([[1] * (TOKENS + 1)])
    engine.prefill([[1]] * BATCH)
    with pytest.raises(UserError, match=rf"backend\.max_batch={BATCH}"):
        engine.prefill([[1]])
