"""Errors of a library in another interpreter, as they reach the user."""

import sys
from pathlib import Path

import pytest

from stages.core.errors import MissingRequirement
from stages.engines.interpreter.process import MAX_ERROR_CHARACTERS, Program, Worker, WorkerError, inspect_interpreter
from stages.engines.interpreter.protocol import EmptyAnswer


def test_a_long_error_of_a_library_is_cut_to_a_line(tmp_path: Path) -> None:
    answer = "{'error': 'ValueError: one\\n\\ttwo ' + 'x' * 1_000_000}"
    (tmp_path / "worker.py").write_text(f"import json\nwhile input():\n    print(json.dumps({answer}))\n")
    program = Program("vllm", "vLLM", tmp_path / "worker.py", "pip install vllm")
    with Worker(program, sys.executable) as worker:
        for _ in range(2):
            with pytest.raises(WorkerError) as caught:
                worker.call("open", EmptyAnswer, 60)
            assert len(str(caught.value)) == MAX_ERROR_CHARACTERS
            assert str(caught.value).startswith("ValueError: one two xxx")
            assert str(caught.value).endswith("xxx...")
    with pytest.raises(MissingRequirement) as refused:
        inspect_interpreter(program, sys.executable)
    assert len(str(refused.value)) < 2 * MAX_ERROR_CHARACTERS
