"""Prompts that join a running batch on backend=torch. The kernels' reference stands in for the attention kernels.

The kernels themselves are interpreted in tests/long/test_reference_kernels.py.
"""

import copy
from collections.abc import Sequence
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
from stages.engines.cuda.engine import KernelEngine, plan_pass
from stages.engines.interface import Continuation, Logits
from stages.engines.reference.model import shape_for
from stages.evaluate.decoding.decode import StoppingCriteria
from stages.evaluate.decoding.free import contradiction, free_answers
from stages.evaluate.inputs.tokens import EncodedSample
from stages.policies.policy import KVPolicy

CHUNK = 50
LENGTHS = (120, 5, 60, 1, 133, 17, 64)
LIMITS = (6, 9, 2, 5, 3, 1, 7)
"""Lengths of prompts (one to three chunks; one joins a running sequence) and of answers (one to nine tokens)."""

Case = tuple[KVPolicy, torch.dtype]
CASES: dict[str, Case] = {
    "fp8k_int4v": (benchlib.load_policy("fp8k_int4v"), torch.float32),
    "guarded": (GUARDED, torch.float32),
    "guarded in bfloat16": (GUARDED, torch.bfloat16),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return short_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    story = benchlib.story_tokens(1, 300)[0].tolist()
    return [story[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]


class RecordingEngine(KernelEngine):
    """An engine that records the logits of every step, the stored data at a sequence's end, and each pass's token counts."""

    rows: dict[tuple[int, ...], Logits]
    stores: dict[tuple[int, ...], Any]
    passes: list[list[int]]

    def _advance(self, live: Sequence[Continuation]) -> tuple[Sequence[Continuation], Logits]:
        before = [request.stored for request in live]
        advanced, logits = super()._advance(live)
        self.rows |= {tuple(request.tokens): row for request, row in zip(advanced, logits, strict=True)}
        self.passes.append([request.stored - stored for request, stored in zip(live, before, strict=True)])
        return advanced, logits

    def _release_all(self, continuations: Sequence[Continuation]) -> None:
        self.stores |= {
            tuple(request.tokens[: request.prompt_tokens]): self.stored(request.sequence) for request in continuations
        }
        super()._release_all(continuations)


@pytest.fixture
def make(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    by_reference(monkeypatch)

    def made(policy: KVPolicy = GUARDED, dtype: torch.dtype = torch.float32) -> RecordingEngine:
        scales = static_scales(policy, shape_for(model, policy))
        engine = RecordingEngine(copy.deepcopy(model).to(dtype), policy, scales)
        engine.prefill_chunk, engine.rows, engine.stores, engine.passes = CHUNK, {}, {}, []
        return engine

    return made


def answer_alone(engine: RecordingEngine, prompts: list[list[int]]) -> list[list[int]]:
    return [engine.generate([prompt], limit, ())[0] for prompt, limit in zip(prompts, LIMITS, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_other_sequences_of_a_pass_change_no_result(name: str, make: Any, prompts: list[list[int]]) -> None:
    """Allow for the order of sums, which rounds a few numbers of a second layer to their neighbours."""
    together, alone = make(*CASES[name]), make(*CASES[name])
    answers = together.generate(prompts, LIMITS, (), max_sequences=2)
    assert [len(answer) for answer in answers] == list(LIMITS)
    assert answers == answer_alone(alone, prompts)
    assert together.rows.keys() == alone.rows.keys()
    assert distance(*(np.stack([watched.rows[key] for key in alone.rows]) for watched in (together, alone))) < CLOSE
    differing: list[list[bool]] = [[], []]
    for prompt in map(tuple, prompts):
        for layer, (mine, theirs) in enumerate(zip(together.stores[prompt], alone.stores[prompt], strict=True)):
            for side in mine:
                differing[layer] += (mine[side].codes != theirs[side].codes).ravel().tolist()
    assert not any(differing[0])
    assert np.mean(differing[1]) < 1e-3
    assert together.memory().live_tokens == 0


def test_free_answers_of_joining_prompts_equal_forced_decode(make: Any, prompts: list[list[int]]) -> None:
    engine = make()
    encoded = [
        EncodedSample(Sample(str(i), "joins", ""), tuple(prompt), (1,) * limit)
        for i, (prompt, limit) in enumerate(zip(prompts, LIMITS, strict=True))
    ]
    answers = free_answers(engine, encoded, 2, StoppingCriteria(stop_tokens=(), extra_tokens=2))
    assert (answers.samples, answers.tokens, answers.contradictions) == (7, sum(LIMITS) + 7 * 2, [])
    assert any(max(sizes) > 1 and min(sizes) == 1 for sizes in engine.passes)


@pytest.mark.parametrize(("dtype", "named"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_token_within_one_rounding_is_no_contradiction(dtype: torch.dtype, named: bool, make: Any) -> None:
    """In bfloat16, logits around 40 are rounded to multiples of 0.25; in float32, to far finer ones."""
    logits = np.concatenate([[40.25, 40.0], np.linspace(20, 38, 500)]).astype(np.float32)[None]
    assert (contradiction(make(GUARDED, dtype), logits, [1]) is not None) is named


def test_running_sequences_decode_while_a_prompt_joins(make: Any, prompts: list[list[int]]) -> None:
    engine = make()
    engine.generate(prompts, LIMITS, (), max_sequences=2)
    assert engine.passes[:6] == [[50, 5], [50, 1], [20, 1], [1, 1], [1, 1], [1, 1]]
    assert [1, 50] in engine.passes
    assert min(map(min, engine.passes)) == 1, "every sequence advances in every pass"


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
    assert engine.cache.pages.used_count == engine.cache.buffers.used_count == 0


@pytest.mark.parametrize("token", [7, 8])
def test_a_refused_step_stores_nothing_of_any_of_its_sequences(token: int, make: Any) -> None:
    """Decode token 7, whose embedding is NaN, in the last row of a batch padded to four, or a sound token."""
    engine = make(GUARDED)
    handles, _ = engine.prefill([[1] * 62, [2] * 5, [3]])
    tensors = [tensor.view(torch.uint8) for group in engine.cache.groups for tensor in (group.paged | group.exact).values()]
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


def test_prompts_are_chunked_alone_and_single_tokens_come_first() -> None:
    """Chunks have 4 tokens, and a pass up to 6."""
    for remaining, passes in (
        ([], []),
        ([9, 2, 3], [[(0, 4), (1, 2)], [(0, 4)], [(0, 1), (2, 3)]]),
        ([12, 4], [[(0, 4)], [(0, 4)], [(0, 4)], [(1, 4)]]),
        ([8, 1, 1], [[(1, 1), (2, 1), (0, 4)], [(0, 4)]]),
    ):
        planned = []
        while any(remaining):
            numbers = [i for i, tokens in enumerate(remaining) if tokens]
            planned.append([(numbers[i], size) for i, size in plan_pass([remaining[i] for i in numbers], 4, 6)])
            for i, size in planned[-1]:
                remaining[i] -= size
        assert planned == passes
