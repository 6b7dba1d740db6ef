"""Errors of a library in its own interpreter become one short line."""

import sys
from pathlib import Path

import pytest

from stages.core.errors import MissingRequirement, UserError
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
                worker.call("open", EmptyAnswer, 60)
            assert len(str(caught.value)) == MOST_SAID
            assert str(caught.value).startswith("ValueError: one two xxx")
            assert str(caught.value).endswith("xxx...")
    with pytest.raises(MissingRequirement) as refused:
        probe(program, sys.executable)
    assert len(str(refused.value)) < 2 * MOST_SAID


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (("ValueError: no such cache", "a child has failed"), "ValueError: no such cache"),
        (("some.module.OwnError: one", "KeyError: two", "bye"), "KeyError: two"),
        (("loading", "bye"), "bye"),
    ],
)
def test_a_worker_that_ends_is_told_with_the_last_exception_that_it_printed(
    printed: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(f"import sys\nsys.stderr.write({chr(10).join(printed)!r})\nsys.exit(input() and 3)\n")
    with (
        Worker(Program("vllm", "vLLM", script, "pip install vllm"), sys.executable) as worker,
        pytest.raises(UserError, match=rf"vLLM ended with exit code 3 in open; .*; it last said: {told}$"),
    ):
        worker.call("open", EmptyAnswer, 60)
