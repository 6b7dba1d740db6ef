"""A function in a child process: its progress, exceptions and end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.core.child import run_in_child
from stages.core.errors import MissingRequirement, UserError
from stages.core.records import Progress


def work(out: Path, *, text: str, progress: Progress) -> None:  # noqa: ARG001
    out.write_text(f"{text} {os.getpid()}")


def refuse(_: Path, *, progress: Progress) -> None:  # noqa: ARG001
    raise UserError("model.path=x: not finite; check the checkpoint")


def die(_: Path, *, progress: Progress) -> None:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGKILL)


def die_of_a_real_time_signal(_: Path, *, progress: Progress) -> None:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGRTMIN + 6)


class Odd(Exception):
    def __init__(self, field: str, cause: str) -> None:
        super().__init__(f"{field}: {cause}")


def fail(_: Path, *, progress: Progress) -> None:  # noqa: ARG001
    raise Odd("layers", "too few")


@pytest.mark.parametrize(
    ("function", "error", "message", "note"),
    [
        (refuse, UserError, r"^model\.path=x: not finite; check the checkpoint$", ""),
        (fail, RuntimeError, "Odd: layers: too few", "in fail"),  # a defect that cannot be pickled keeps its traceback
        (die_of_a_real_time_signal, MissingRequirement, r"its process was killed \(signal 40\)", ""),
        (die, MissingRequirement, r"die: its process was killed \(SIGKILL\): out of memory", ""),
    ],
)
def test_an_error_of_the_child_is_raised_in_the_caller(
    function: Callable[..., None], error: type[Exception], message: str, note: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        run_in_child(function, tmp_path, progress=lambda *_: None)
    assert note in "".join(getattr(caught.value, "__notes__", []))


def wait(out: Path, *, progress: Progress) -> None:
    try:
        progress("waiting", 0, 1)
        time.sleep(60)
    finally:
        out.write_text("tidied up")


def test_an_interrupt_ends_the_child_after_its_cleanup(tmp_path: Path) -> None:
    def interrupt(*update: object) -> None:
        assert update == ("waiting", 0, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_child(wait, tmp_path / "out", progress=interrupt)
    assert (tmp_path / "out").read_text() == "tidied up"


SCRIPT = """
import sys
from pathlib import Path
from stages.core.child import run_in_child
print("once")
from test_child import work
run_in_child(work, Path(sys.argv[1]), text="script", progress=lambda *_: None)
"""


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[3])])
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": paths}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert completed.stdout == "once\n"
    assert (tmp_path / "out").read_text().startswith("script")
