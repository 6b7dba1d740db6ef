"""backend=torch with the attention kernels against the reference engine, on a GPU or in Triton's interpreter on a CPU.

The interpreter takes about 20 ms per token and layer, so prompts are short and steps few. On a CPU, the kernels' plain
reference computes prompts, except in the test of prefill. test_kernel_attention.py and test_kernel_append.py test the kernels.
"""

import copy
from typing import Any

import pytest
import torch
from helpers.engines.random_llama import static_scales
from helpers.kernels.engines import CLOSE, GUARDED, append_by_reference, by_reference, distance, short_model
from torch import Tensor

from benchmarks import benchlib
from plugins.kv_attention import launch
from stages.core.errors import UserError
from stages.core.records import PREFILL_CHUNK
from stages.engines.cuda.engine import KernelEngine
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.model import shape_for
from stages.policies.policy import KVPolicy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POLICIES = [*map(benchlib.load_policy, ("fp16", "fp8", "int8", "fp8k_int4v", "fp8_token", "fp8k_nvfp4v")), GUARDED]
BY_NAME = {policy.name: policy for policy in POLICIES}
LENGTHS = (127, 1, 64)
"""Prompt lengths. Two more tokens fill a page, extend a one-token sequence, and begin a page. One policy decodes all three,
padded to four rows."""
STEPS = 2

FAULT_DISTANCE = 1e-2
"""Minimum distance of logits that shows a fault of the cache instead of rounding."""


@pytest.fixture(scope="module")
def full_model() -> Any:
    return benchlib.load_model()


@pytest.fixture(scope="module")
def model() -> Any:
    return short_model()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    tokens = benchlib.story_tokens(len(LENGTHS), max(LENGTHS) + STEPS)
    return [row[: length + STEPS].tolist() for row, length in zip(tokens, LENGTHS, strict=True)]


def engines(model: Any, policy: KVPolicy, prefill_chunk: int = PREFILL_CHUNK) -> tuple[KernelEngine, TorchEngine]:
    """Return the engine over the kernels, and the reference engine."""
    on_device = model if DEVICE == "cpu" else copy.deepcopy(model).to(DEVICE)
    scales = static_scales(policy, shape_for(model, policy))
    pair = KernelEngine(on_device, policy, scales), TorchEngine.from_model(model, policy, scales)
    for engine in pair:
        engine.prefill_chunk = prefill_chunk
    return pair


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels by their plain reference on a CPU, where the interpreter is slow."""
    if DEVICE == "cpu":
        by_reference(monkeypatch)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_ragged_batch_decodes_like_the_reference(
    policy: KVPolicy, model: Any, full_model: Any, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, the kernels themselves decode three of the policies. Other tests interpret the kernels of other formats."""
    model = full_model if policy.name == "fp8k_int4v" else model
    kernels, reference = engines(model, policy, prefill_chunk=80)
    batch = texts if policy.name == "int8" else texts[:2]
    prompts = [text[:-STEPS] for text in batch]
    with monkeypatch.context() as patch:
        if DEVICE == "cpu":
            by_reference(patch)
        (handles, first), (same, expected) = kernels.prefill(prompts), reference.prefill(prompts)
    assert distance(first, expected) < CLOSE
    if DEVICE == "cpu" and policy.name not in ("fp8k_int4v", "fp8k_nvfp4v", "guarded"):
        by_reference(monkeypatch)
    # The second step reads a token that the first step stored.
    for step in range(1 if policy.name == "fp8k_nvfp4v" else STEPS):
        tokens = [text[step - STEPS] for text in batch]
        assert distance(kernels.decode(handles, tokens), reference.decode(same, tokens)) < CLOSE


def test_a_prompt_in_two_chunks_is_prefilled_like_the_reference(
    model: Any, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second chunk reads a full page and a partial page of the first chunk."""
    kernels, reference = engines(model, GUARDED, prefill_chunk=70)
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "append", append_by_reference)
    (_, logits), (_, expected) = kernels.prefill([texts[0][:80]]), reference.prefill([texts[0][:80]])
    assert distance(logits, expected) < CLOSE


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["fp16", "fp8", "int8"])
def test_a_corrupted_key_scale_affects_stored_and_later_tokens(name: str, model: Any, texts: list[list[int]]) -> None:
    policy, prompt = BY_NAME[name], texts[0][:40]
    (kernels, reference), (_, sound) = engines(model, policy), engines(model, policy)
    handles, _ = kernels.prefill([prompt])
    for exact in (reference, sound):
        assert exact.prefill([prompt])[0] == handles
    for engine in (kernels, reference):
        engine.corrupt_key_scale(2.0)
    for token in texts[0][40:42]:
        logits, expected = kernels.decode(handles, [token]), reference.decode(handles, [token])
        assert distance(logits, expected) < CLOSE
        assert distance(logits, sound.decode(handles, [token])) > FAULT_DISTANCE


def test_a_pass_is_captured_again_after_its_tensors_moved(model: Any) -> None:
    engine, _ = engines(model, GUARDED)
    cache = engine.pool
    handles = [cache.start()]
    cache.reserve(handles, 64)
    cache.widen_page_table(handles)
    before = engine._pass(1)
    cache.widen_page_table(handles)
    assert engine._pass(1) is before
    for move in (
        lambda: cache.reserve(handles, 64 * (cache.columns + 1)),  # more pages
        lambda: cache.widen_page_table(handles),  # more columns
        cache.start,  # more exact buffers
        lambda: engine.corrupt_key_scale(2.0),  # other scales to read with
    ):
        captured = engine._pass(1)
        move()
        assert engine._pass(1) is not captured
    read = [tensor.data_ptr() for layer in range(2) for tensor in engine.attention_tensors(layer).values()]
    cache.widen_page_table(handles)
    assert read == [tensor.data_ptr() for layer in range(2) for tensor in engine.attention_tensors(layer).values()]


def limited_zeros(tensors: int) -> Any:
    """Return a replacement of torch.zeros that has memory for a limited number of tensors."""
    zeros, remaining = torch.zeros, iter(range(tensors))

    def allocate(*shape: Any, **options: Any) -> Tensor:
        if next(remaining, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*shape, **options)

    return allocate


@pytest.mark.usefixtures("quick")
def test_a_cache_that_cannot_grow_is_refused_and_unchanged(
    model: Any, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ends at the first or second tensor. GUARDED has pools, scale pools and exact buffers."""
    engine, reference = engines(model, GUARDED)
    (handles, _), (same, _) = engine.prefill([texts[0][:63]]), reference.prefill([texts[0][:63]])
    cache = engine.pool

    def state() -> Any:
        tensors = [tensor for group in cache.groups for tensor in group.tensors.values()]
        return [x.data_ptr() for x in tensors], cache.memory(), cache.moves

    before = state()
    for grow, message in (
        (lambda: cache.reserve(handles, 500), "9 pages of 64 tokens are needed"),
        (cache.start, r"2 exact buffers \(one per sequence\) are needed"),
    ):
        for tensors in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(torch, "zeros", limited_zeros(tensors))
                with pytest.raises(
                    UserError,
                    match=f"^backend.device={DEVICE}: its memory is too small: {message}, in addition to the present 1 while",
                ):
                    grow()
            assert state() == before
    # With enough memory the same pages are reserved, and the stored tokens are intact.
    cache.reserve(handles, 500)
    token = texts[0][63]
    assert distance(engine.decode(handles, [token]), reference.decode(same, [token])) < CLOSE
