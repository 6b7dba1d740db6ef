"""Greedy generation on the embedded engine and the oracle, of more prompts than may be live at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_fixtures import BY_NAME, load_model, make_engine, make_oracle, shared_checkpoint, shared_decoder

from pipeline.core.engine import Continuation, Engine
from pipeline.core.kv import KVShape
from stages.engines.base import Logits

torch.set_num_threads(1)

LENGTHS = (70, 1, 200, 3, 64, 129, 12)
LIMITS = (3, 12, 2, 9, 1, 5, 7)
PROMPTS: list[list[int]] = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_decoder(tmp_path_factory, "float32")


def watched(engine: Engine) -> dict[tuple[int, ...], bytes]:
    """Return the bytes of the logits after every history that an engine continues from now on."""
    rows, advance = {}, engine._advance

    def advanced(live: Sequence[Continuation]) -> tuple[Sequence[Continuation], Logits]:
        ready, logits = advance(live)
        rows.update({tuple(one.tokens): row.tobytes() for one, row in zip(ready, logits, strict=True)})
        return ready, logits

    engine._advance = advanced  # type: ignore[method-assign]
    return rows


def alone(engine: Engine) -> list[list[int]]:
    return [engine.generate([prompt], limit, None)[0] for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


@pytest.mark.parametrize("attention", ["native", "graph"])
@pytest.mark.parametrize("name", ["fp8", "ages"])
def test_logits_of_the_embedded_engine_do_not_depend_on_who_else_is_live_bit_by_bit(
    name: str, attention: Any, decoder: Path, tmp_path: Path
) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME[name], prefill_chunk=128, attention=attention)
    rows = watched(engine)
    expected = alone(engine)
    exact = dict(rows)
    assert len(exact) == sum(LIMITS)
    for most in (2, 5, None):
        rows.clear()
        assert engine.generate(PROMPTS * 3, LIMITS * 3, None, max_sequences=most) == expected * 3
        assert rows == exact
    assert engine.pool.in_use == (0, 0)


@pytest.mark.parametrize("name", ["int4", "recent"])
def test_the_oracle_answers_each_prompt_as_alone(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = load_model(shared_checkpoint(tmp_path_factory))
    engine = make_oracle(model, BY_NAME[name], KVShape(layers=2, kv_heads=2, head_dim=64), prefill_chunk=128)
    expected = alone(engine)
    for most in (2, None):
        assert engine.generate(PROMPTS, LIMITS, None, max_sequences=most) == expected
    assert not engine.sequences


def test_a_pool_that_is_full_when_a_prompt_joins_lets_the_prompt_wait(decoder: Path, tmp_path: Path) -> None:
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME["fp8"], max_pages=4)
    assert engine.generate(PROMPTS, LIMITS, None, max_sequences=2) == alone(engine)
    assert engine.pool.in_use == (0, 0)
