"""Prompts for engines of real libraries, and assertions on the logits that the engines return for them.

Logits are compared with the reference engine's and between batched, stepwise and free decoding.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.checkpoints.loading import load_causal_lm, load_tokenizer
from stages.engines.interpreter.requests import InspectableEngine, RequestEngine
from stages.engines.reference.attention import Fed
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.replay import Replay
from stages.evaluate.distances.distance import kl_of_logits
from stages.workloads.generated import generate

FIRST = 60
"""Tokens of a prompt; the remaining tokens are forced."""
BFLOAT16 = 2.0**-8
"""Relative rounding error of an activation."""
CPU = Path("/proc/cpuinfo")
KNOWN_LAYOUT = pytest.mark.skipif(
    CPU.exists() and "amx_tile" in CPU.read_text(encoding="utf-8"),
    reason="vLLM takes its AMX kernels on this processor, and only the layout of its `vec` kernels is known",
)


def two_stories(checkpoint: Path) -> list[list[int]]:
    """Return the tokens of two stories, 160 and 100 tokens long."""
    tokenizer = load_tokenizer(checkpoint)
    stories = [tokenizer(sample.prompt or sample.reference)["input_ids"] for sample in generate("prose", 40, 0)]
    long = [story for story in stories if len(story) >= 160]
    return [long[0][:160], long[1][:100]]


def mean_kl(expected: np.ndarray, rows: np.ndarray) -> float:
    return float(kl_of_logits(expected, rows).mean())


def assert_reads_what_it_stored(
    engine: InspectableEngine[Any, Any], checkpoint: Path, text: list[int], number: int, rows: np.ndarray, *,
    first: int = FIRST, rounding: float = BFLOAT16, floor: float = 1e-6,
) -> Replay:  # fmt: skip
    """Assert that the reference engine, reading the engine's stored cache, gives the engine's `rows` up to rounding.

    Returns the replay.
    """
    model = load_causal_lm(checkpoint, dtype=torch.float32)
    reference = TorchEngine.from_model(model, engine.policy, engine._scales)
    reference.reads_itself = True
    fed = Fed(text, [(first, False), (len(text) - first, True)])
    replay = reference.replay([fed], [engine.stored_request(number)], rounding=rounding)[0].tail(len(rows))
    assert mean_kl(replay.logits, rows) < 10 * mean_kl(replay.logits, replay.disturbed) + floor
    return replay


def assert_batches_steps_and_answers_agree(
    engine: RequestEngine[Any, Any], texts: list[list[int]], max_kl: float
) -> list[np.ndarray]:
    """Assert that batches, decode steps and free answers agree within a mean KL of `max_kl`; return the batch's logits."""
    together = engine.forced_together([(text, FIRST) for text in texts])
    for rows, text in zip(together, texts, strict=True):
        assert mean_kl(rows, engine.forced(text, FIRST)) < max_kl
    (handle,), _ = engine.prefill([texts[0][:FIRST]])
    stepped = np.stack([engine.decode([handle], [token])[0] for token in texts[0][FIRST : FIRST + 3]])
    assert mean_kl(together[0][:3], stepped) < max_kl
    memory = engine.memory()
    assert memory.pool_bytes == engine.policy.pool_bytes(engine.shape, memory.pages) > 0
    engine.release([handle])
    ((answer),) = engine.generate([texts[1][:FIRST]], 12, ())
    assert engine.forced([*texts[1][:FIRST], *answer], FIRST).argmax(1).tolist()[:-1] == answer[1:]
    times = engine.timed([text[:FIRST] for text in texts[:2]], 6)
    assert (len(times.first_token_ms), len(times.step_ms)) == (2, 6)
    assert times.memory.pool_bytes == engine.policy.pool_bytes(engine.shape, 4)
    return together
