"""Acceptance length of a draft checkpoint compared with transformers' assisted generation.

Prompt lookup is tested in test_speculation.py.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.checkpoints.loading import load_causal_lm
from stages.evaluate.decoding.speculation import Draft, draft_passes
from stages.evaluate.inputs.tokens import BundleTokenizer
from stages.workloads.generated import generate

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "stages" / "tiny" / "checkpoint"
MOST = 48
"""Maximum tokens of an answer."""
PROPOSED = 5


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that often, but not always, agrees with the target: the target with noise on its weights."""
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
    """Return the greedy answer of transformers' `generate`, including the stop token, and the model's forward passes."""
    ids = torch.tensor([prompt])
    fixed = {"do_sample": False, "max_new_tokens": MOST, "eos_token_id": stop, "pad_token_id": stop, **options}
    with counted_passes(model) as passes, torch.inference_mode():
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **fixed)
    return text[0, len(prompt) :].tolist(), passes[0]


def test_a_draft_checkpoint_takes_the_passes_of_assisted_generation(draft: Path) -> None:
    tokenizer = BundleTokenizer(TINY)
    target, assistant = (load_causal_lm(model, dtype=torch.float32).eval() for model in (TINY, draft))
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.assistant_confidence_threshold = PROPOSED, 0.0
    settings.num_assistant_tokens_schedule = "constant"
    drafter = Draft(str(draft))
    tokens = counted = 0
    counts = {"copy": 4, "retrieval": 4, "tool_call": 4, "prose": 2}
    for sample in (sample for name, count in counts.items() for sample in generate(name, count, seed=3)):
        prompt = tokenizer.prompt_ids(sample)
        said, passes = answered(target, prompt, tokenizer.end, assistant_model=assistant)
        assert draft_passes(drafter.greedy(prompt, said), said, PROPOSED) == passes
        tokens, counted = tokens + len(said), counted + passes
    assert 1.3 < tokens / counted < PROPOSED + 0.7  # the draft is neither always wrong nor always right
