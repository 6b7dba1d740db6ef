"""Errors of a library in an interpreter of its own are a short line."""

import sys
from pathlib import Path

import pytest

from pipeline.core.errors import MissingRequirement
from stages.engines.interpreter.process import MOST_SAID, Program, Worker, WorkerError, probe
from stages.engines.interpreter.protocol import EmptyAnswer


@pytest.fixture
def program(tmp_path: Path) -> Program:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json\nwhile input():\n    print(json.dumps({'error': 'ValueError: one\\n\\ttwo ' + 'x' * 1_000_000}))\n"
    )
    return Program("vllm", "vLLM", script, "pip install vllm")


def test_a_long_error_of_a_library_is_cut_to_a_line(program: Program) -> None:
    with Worker(program, sys.executable) as worker:
        for _ in range(2):
            with pytest.raises(WorkerError) as caught:
                worker.call("open", 60, key="k", answer=EmptyAnswer)
            assert len(str(caught.value)) == MOST_SAID
            assert str(caught.value).startswith("ValueError: one two xxx")
            assert str(caught.value).endswith("xxx...")
    with pytest.raises(MissingRequirement) as refused:
        probe(program, sys.executable)
    assert len(str(refused.value)) < 2 * MOST_SAID
