"""Acceptance lengths beside real speculative decoding: transformers' own, and step by step over a quantized cache."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.core.kv import KVPolicy
from stages.checkpoints import load_causal_lm
from stages.engines.oracle.engine import OracleEngine
from stages.evaluate.decoding.speculation import Draft, draft_passes, lookup_passes
from stages.evaluate.inputs.tokens import BundleTokenizer
from stages.workloads import generate

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "stages" / "tiny" / "checkpoint"
INT4 = {"dtype": "int4", "granularity": "per_group", "group_size": 32, "scale": "dynamic"}
MOST = 48
"""Tokens of an answer."""
PROPOSED = 5


@pytest.fixture(scope="module")
def target() -> Any:
    return load_causal_lm(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that agrees with the target often, not always: the same with noise on its weights."""
    directory = tmp_path_factory.mktemp("draft") / "draft"
    shutil.copytree(TINY, directory)
    noisy = load_causal_lm(TINY, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in noisy.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn_like(weight), alpha=0.12 * float(weight.std()))
    noisy.save_pretrained(directory)
    shutil.copyfile(TINY / "config.json", directory / "config.json")
    return directory


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = BundleTokenizer(TINY)
    counts = {"copy": 4, "retrieval": 4, "tool_call": 4, "prose": 2}
    samples = [sample for name, count in counts.items() for sample in generate(name, count, seed=3)]
    return [tokenizer.prompt_ids(sample) for sample in samples]


@contextmanager
def counted_passes(model: Any) -> Iterator[list[int]]:
    """Count the forward passes of a model."""
    passes = [0]

    def count(*_: object) -> None:
        passes[0] += 1

    hook = model.register_forward_hook(count)
    try:
        yield passes
    finally:
        hook.remove()


def answered(model: Any, prompt: Sequence[int], stop: int, **options: Any) -> tuple[list[int], int]:
    """The greedy answer of transformers' `generate`, the stop token included, and the passes of the model."""
    ids = torch.tensor([prompt])
    fixed = {"do_sample": False, "max_new_tokens": MOST, "eos_token_id": stop, "pad_token_id": stop, **options}
    with counted_passes(model) as passes, torch.inference_mode():
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **fixed)
    return text[0, len(prompt) :].tolist(), passes[0]


def test_prompt_lookup_takes_the_passes_of_transformers(target: Any, prompts: list[list[int]]) -> None:
    stop = BundleTokenizer(TINY).eos_token_id
    saved = 0
    for prompt in prompts:
        said, passes = answered(target, prompt, stop, prompt_lookup_num_tokens=10, max_matching_ngram_size=3)
        assert said == answered(target, prompt, stop)[0]
        assert lookup_passes(prompt, said, 10, 3) == passes
        saved += len(said) - passes
    assert saved > 20


def test_a_draft_checkpoint_takes_the_passes_of_assisted_generation(target: Any, draft: Path, prompts: list[list[int]]) -> None:
    stop = BundleTokenizer(TINY).eos_token_id
    assistant = load_causal_lm(draft, dtype=torch.float32).eval()
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.assistant_confidence_threshold = PROPOSED, 0.0
    settings.num_assistant_tokens_schedule = "constant"
    drafter = Draft(str(draft))
    tokens = counted = 0
    for prompt in prompts:
        said, passes = answered(target, prompt, stop, assistant_model=assistant)
        assert draft_passes(drafter.greedy(prompt, said), said, PROPOSED) == passes
        tokens, counted = tokens + len(said), counted + passes
    assert 1.3 < tokens / counted < PROPOSED + 0.7  # neither a draft that is always wrong, nor one that is always right


def test_speculation_step_by_step_over_a_quantized_cache_takes_the_counted_passes(
    target: Any, draft: Path, prompts: list[list[int]]
) -> None:
    policy = KVPolicy.model_validate({"name": "int4", "key": INT4, "value": INT4})
    engine, drafter = OracleEngine.from_model(target, policy), Draft(str(draft))
    stop = BundleTokenizer(TINY).eos_token_id
    for prompt in prompts[:8]:
        said: list[int] = []
        passes = 0
        while len(said) < MOST and stop not in said:
            text = [*prompt, *said]
            proposed: list[int] = []
            for _ in range(PROPOSED):  # token by token, each after all of the draft's own before
                row = drafter.engine.forced([*text, *proposed], len(text) + len(proposed) - 1)[0]
                proposed.append(int(row.argmax()))
            rows = engine.forced([*text, *proposed], len(prompt) - 1)[len(said) :]
            verified = rows.argmax(axis=1).tolist()
            agree = next((i for i in range(PROPOSED) if proposed[i] != verified[i]), PROPOSED)
            said += verified[: agree + 1]
            passes += 1
        said = said[: said.index(stop) + 1] if stop in said else said[:MOST]
        alone = engine.forced([*prompt, *said[:-1]], len(prompt) - 1)
        assert said == alone.argmax(axis=1).tolist()  # what decoding says one by one
        assert draft_passes(drafter.greedy(prompt, said), said, PROPOSED) == passes
