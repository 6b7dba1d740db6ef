"""A function in a child process: its progress, exceptions and end; errors of a library in an interpreter of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.core.child import in_child
from stages.core.errors import MissingRequirement, UserError
from stages.core.records import Progress
from stages.engines.interpreter.process import MAX_ERROR_CHARACTERS, Program, Worker, WorkerError, inspect_interpreter
from stages.engines.interpreter.protocol import EmptyAnswer


def work(out: Path, *, text: str, progress: Progress) -> None:  # noqa: ARG001
    out.write_text(f"{text} {os.getpid()}")


def refuse(_: Path, *, progress: Progress) -> None:  # noqa: ARG001
    raise UserError("model.path=x: not finite; check the checkpoint")


def die(_: Path, *, progress: Progress) -> None:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGKILL)


class Odd(Exception):
    def __init__(self, field: str, cause: str) -> None:
        super().__init__(f"{field}: {cause}")


def fail(_: Path, *, progress: Progress) -> None:  # noqa: ARG001
    raise Odd("layers", "too few")


@pytest.mark.parametrize(
    ("function", "error", "said", "note"),
    [
        (refuse, UserError, r"^model\.path=x: not finite; check the checkpoint$", ""),
        (fail, RuntimeError, "Odd: layers: too few", "in fail"),  # a defect that cannot be pickled keeps its traceback
        (die, MissingRequirement, r"die: its process was killed \(SIGKILL\): out of memory", ""),
    ],
)
def test_an_error_of_the_child_is_raised_in_the_caller(
    function: Callable[..., None], error: type[Exception], said: str, note: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said) as caught:
        in_child(function, tmp_path, progress=lambda *_: None)
    assert note in "".join(getattr(caught.value, "__notes__", []))


def wait(out: Path, *, progress: Progress) -> None:
    try:
        progress("waiting", 0, 1)
        time.sleep(60)
    finally:
        out.write_text("tidied up")


def test_an_interrupted_caller_ends_it_and_it_tidies_up(tmp_path: Path) -> None:
    def interrupt(*update: object) -> None:
        assert update == ("waiting", 0, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_child(wait, tmp_path / "out", progress=interrupt)
    assert (tmp_path / "out").read_text() == "tidied up"


SCRIPT = """
import sys
from pathlib import Path
from stages.core.child import in_child
print("once")
from test_child import work
in_child(work, Path(sys.argv[1]), text="script", progress=lambda *_: None)
"""


def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[3])])
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": paths}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "once\n"
    assert (tmp_path / "out").read_text().startswith("script")


def test_a_long_error_of_a_library_is_cut_to_a_line(tmp_path: Path) -> None:
    said = "{'error': 'ValueError: one\\n\\ttwo ' + 'x' * 1_000_000}"
    (tmp_path / "worker.py").write_text(f"import json\nwhile input():\n    print(json.dumps({said}))\n")
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


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (("ValueError: no such cache", "a child has failed"), "ValueError: no such cache"),
        (("loading", "bye"), "bye"),
    ],
)
def test_a_dead_worker_is_reported_with_its_last_exception(printed: tuple[str, ...], told: str, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(f"import sys\nsys.stderr.write({chr(10).join(printed)!r})\nsys.exit(input() and 3)\n")
    with (
        Worker(Program("vllm", "vLLM", script, "pip install vllm"), sys.executable) as worker,
        pytest.raises(UserError, match=rf"vLLM ended with exit code 3 in open; .*; it last said: {told}$"),
    ):
        worker.call("open", EmptyAnswer, 60)
