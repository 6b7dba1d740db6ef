"""vLLM's worker returns the logits that vLLM actually sampled from."""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stages.engines.interpreter
import stages.engines.vllm

PROGRAMS = [str(Path(room.__path__[0]) / "worker") for room in (stages.engines.interpreter, stages.engines.vllm)]
REQUEST: dict[str, Any] = {"forced": [2, 0], "tokens": 3, "skip": 1}
ROWS = torch.tensor([[0.0, 1.0, 2.0], [1.5, 0.5, 0.0], [0.0, 3.0, 1.0]])
TOKENS = (2, 0, 1)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    for program in PROGRAMS:
        monkeypatch.syspath_prepend(program)
    for name in ("kvgate_vllm_worker", "kvgate_vllm_cache", "kvgate_rows", "kvgate_channel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return import_module("kvgate_vllm_worker")


def handed(worker: Any, path: Path, reported: torch.Tensor) -> Any:
    """Return the worker's answer for rows whose steps vLLM reports with the logits `reported`."""
    for step, row in enumerate(ROWS):
        worker.kvgate_rows.put(str(path), REQUEST, step, row)
    said = [
        {token: SimpleNamespace(logprob=float(row[token]))} for row, token in zip(reported.log_softmax(-1), TOKENS, strict=True)
    ]
    return worker._answer(REQUEST, str(path), SimpleNamespace(outputs=[SimpleNamespace(token_ids=TOKENS, logprobs=said)]))


def test_rows_of_the_scored_steps_are_handed_over(worker: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    assert handed(worker, path, ROWS) == {"tokens": list(TOKENS), "logits": str(path), "shape": [2, 3]}
    assert torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(2, 3).equal(ROWS[1:])


def test_a_row_that_is_not_the_one_vllm_sampled_from_is_noticed(worker: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"step 1: log-probability -\d.* was reported of token 0, its row has -0\."):
        handed(worker, tmp_path / "rows", ROWS.roll(1, dims=0))
