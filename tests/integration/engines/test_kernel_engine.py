"""The engine of backend=torch over the attention kernels. The kernels' reference stands in for the kernels.

The kernels themselves are interpreted in tests/long/test_reference_kernels.py.
"""

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines.random_llama import static_scales
from helpers.kernels.engines import CLOSE, GUARDED, by_reference, distance, short_model

from benchmarks import benchlib
from stages.core.errors import UserError
from stages.core.records import Sample
from stages.engines.cuda.engine import KernelEngine
from stages.engines.reference.model import shape_for
from stages.evaluate.decoding.decode import StoppingCriteria
from stages.evaluate.decoding.free import contradiction, free_answers
from stages.evaluate.decoding.system import wrong_allocation
from stages.evaluate.inputs.tokens import EncodedSample
from stages.policies.policy import KVPolicy

LENGTHS = (120, 5, 60, 1, 133, 17, 64)
LIMITS = (6, 9, 2, 5, 3, 1, 7)
"""Lengths of prompts (one to three chunks) and of answers (one to nine tokens)."""


@pytest.fixture(scope="module")
def model() -> Any:
    return short_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    story = benchlib.story_tokens(1, 300)[0].tolist()
    return [story[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture
def make(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    by_reference(monkeypatch)

    def made(policy: KVPolicy = GUARDED, dtype: torch.dtype = torch.float32) -> KernelEngine:
        engine = KernelEngine(copy.deepcopy(model).to(dtype), policy, static_scales(policy, shape_for(model, policy)))
        engine.prefill_chunk = 50
        return engine

    return made


@pytest.mark.parametrize("name", ["fp8k_int4v", "guarded"])
def test_free_answers_equal_forced_decode(name: str, make: Any, prompts: list[list[int]]) -> None:
    engine = make(GUARDED if name == "guarded" else benchlib.load_policy(name))
    encoded = [
        EncodedSample(Sample(str(i), "story", ""), tuple(prompt), (1,) * limit)
        for i, (prompt, limit) in enumerate(zip(prompts, LIMITS, strict=True))
    ]
    answers = free_answers(engine, encoded, 2, StoppingCriteria(stop_tokens=(), extra_tokens=2))
    assert (answers.samples, answers.tokens, answers.contradictions) == (7, sum(LIMITS) + 7 * 2, [])
    assert engine.memory().live_tokens == 0


def test_a_fork_and_a_full_pool_change_no_logits(make: Any, prompts: list[list[int]]) -> None:
    """The pool has pages for one of the two longest requests at a time."""
    engine = make()
    (handle,), _ = engine.prefill([prompts[0][:100]])
    copies = [handle, engine.fork(handle)]
    for token in prompts[0][100:103]:
        rows = engine.decode(copies, [token, token])
        assert distance(rows[:1], rows[1:]) < 1e-6
    engine.release(copies)
    requests = [(prompts[0], 60), (prompts[4], 64), (prompts[2], 50)]
    (roomy,), (crowded,) = engine.serve_rounds([requests], 8), engine.serve_rounds([requests], 8, pages=4)
    assert sum(answer.preempted for answer in crowded) > 0
    for mine, theirs in zip(crowded, roomy, strict=True):
        assert distance(mine.logits, theirs.logits) < CLOSE
    assert engine.pool.pages.used_count == 0


@pytest.mark.parametrize(("dtype", "named"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_token_within_one_rounding_is_no_contradiction(dtype: torch.dtype, named: bool, make: Any) -> None:
    """In bfloat16, logits around 40 are rounded to multiples of 0.25; in float32, to far finer ones."""
    logits = np.concatenate([[40.25, 40.0], np.linspace(20, 38, 500)]).astype(np.float32)[None]
    assert (contradiction(make(GUARDED, dtype), logits, [1]) is not None) is named


@pytest.mark.parametrize("place", [0, 4, 6])
def test_non_finite_keys_are_refused_and_everything_is_released(place: int, make: Any, prompts: list[list[int]]) -> None:
    """Use token 7, whose embedding is NaN."""
    engine = make()
    embeddings = engine.model.model.embed_tokens.weight.detach().clone()
    embeddings[7] = torch.nan
    engine.model.model.embed_tokens.weight = torch.nn.Parameter(embeddings)  # unties the embedding from the output matrix
    broken = [[*prompt, 7] if i == place else prompt for i, prompt in enumerate(prompts)]
    with pytest.raises(UserError, match="a key of layer 0 is not finite as a float16"):
        engine.generate(broken, LIMITS, (), max_sequences=2)
    assert engine.memory().live_tokens == 0
    assert engine.pool.pages.used_count == engine.pool.buffers.used_count == 0


@pytest.mark.parametrize("token", [7, 8])
def test_a_refused_step_stores_nothing_of_any_of_its_sequences(token: int, make: Any) -> None:
    """Decode token 7, whose embedding is NaN, in the last row of a batch padded to four, or a sound token."""
    engine = make(GUARDED)
    handles, _ = engine.prefill([[1] * 62, [2] * 5, [3]])
    assert wrong_allocation(engine) == ""
    tensors = [tensor.view(torch.uint8) for tensor in engine.pool.tensors.values()]
    before = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        engine.model.model.embed_tokens.weight[7] = torch.nan
    refused = pytest.raises(UserError, match="a key of layer 0 is not finite")
    with refused if token == 7 else nullcontext():
        engine.decode(handles, [4, 5, token])
    assert all(map(torch.equal, before, tensors)) is (token == 7)
    assert engine.memory().live_tokens == (68 if token == 7 else 71)


def test_a_bfloat16_model_stores_and_decodes_within_its_rounding(make: Any) -> None:
    engine, half = make(), make(GUARDED, torch.bfloat16)
    prompts = [list(range(10, 72)), [2] * 5]
    (exact_handles, first), (handles, rows) = engine.prefill(prompts), half.prefill(prompts)
    assert rows.dtype == np.float32
    assert 1e-4 < distance(rows, first) < 3e-2
    step = half.decode(handles, [4, 5])
    assert 1e-4 < distance(step, engine.decode(exact_handles, [4, 5])) < 3e-2
    assert {x.dtype for p in half._passes.values() for x in (p.keys, p.values)} == {torch.bfloat16}
