"""Greedy generation on the ONNX engine with more prompts than may be live at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_fixtures import BY_NAME, make_engine

from stages.engines.base import Logits
from stages.engines.interface import Continuation, Engine

LENGTHS = (70, 1, 200, 3, 64, 129, 12)
LIMITS = (3, 12, 2, 9, 1, 5, 7)
PROMPTS: list[list[int]] = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in LENGTHS]


def watched(engine: Engine) -> dict[tuple[int, ...], bytes]:
    """Record the logits' bytes after every history that the engine continues; return the record."""
    rows, advance = {}, engine._advance

    def advanced(live: Sequence[Continuation]) -> tuple[Sequence[Continuation], Logits]:
        ready, logits = advance(live)
        rows.update({tuple(one.tokens): row.tobytes() for one, row in zip(ready, logits, strict=True)})
        return ready, logits

    engine._advance = advanced  # type: ignore[method-assign]
    return rows


def alone(engine: Engine) -> list[list[int]]:
    return [engine.generate([prompt], limit, ())[0] for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


@pytest.mark.parametrize(("name", "attention"), [("fp8", "graph"), ("ages", "native")])
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
        assert engine.generate(PROMPTS * 3, LIMITS * 3, (), max_sequences=most) == expected * 3
        assert rows == exact
    assert engine.pool.in_use == (0, 0)
