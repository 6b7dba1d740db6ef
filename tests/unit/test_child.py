"""A function in a process of its own: its progress, its exception, its end."""

import os
import signal
from pathlib import Path

import pytest

from pipeline.artifacts.child import in_child
from pipeline.core.errors import UserError
from pipeline.core.records import Progress


def work(out: Path, *, text: str, progress: Progress) -> None:
    progress("writing", 1, 2)
    out.write_text(f"{text} {os.getpid()}")


def refuse(_: Path, *, progress: Progress) -> None:  # noqa: ARG001
    raise UserError("model.path=x: not finite; check the checkpoint")


def die(_: Path, *, progress: Progress) -> None:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_function_works_in_another_process_and_shows_its_progress_here(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    in_child(work, tmp_path / "out", text="done", progress=lambda *one: told.append(one))
    text, process = (tmp_path / "out").read_text().split()
    assert (text, told) == ("done", [("writing", 1, 2)])
    assert int(process) != os.getpid()


def test_what_it_raises_is_raised_here_with_where_it_came_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.path=x: not finite; check the checkpoint") as caught:
        in_child(refuse, tmp_path, progress=lambda *_: None)
    assert "in refuse" in "".join(caught.value.__notes__)


def test_a_process_that_is_killed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="die: its process ended with exit code -9"):
        in_child(die, tmp_path, progress=lambda *_: None)
