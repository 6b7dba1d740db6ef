"""The console's output: progress, jobs, errors and sentences, with and without a terminal."""

import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.cli import console, progress
from pipeline.cli.console import Column, Grid, relative
from pipeline.cli.progress import Phases, describe_task, show_progress


@pytest.fixture(autouse=True)
def _silent_afterwards() -> Iterator[None]:
    yield
    console.close()


def stderr(monkeypatch: pytest.MonkeyPatch, terminal: bool, width: int = 160) -> io.StringIO:
    stream = io.StringIO()
    recorder = Console(file=stream, force_terminal=terminal, width=width, highlight=False, color_system=None)
    monkeypatch.setattr(console, "err", recorder)
    return stream


def wait_for(stream: io.StringIO, text: str) -> None:
    for _ in range(3000):
        if text in stream.getvalue():
            return
        time.sleep(0.01)
    raise AssertionError(f"{text!r} is not in {stream.getvalue()!r}")


TOKENS, SAMPLES = "forced decode [tokens]", "answers [samples]"


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        ([(3, None)], "3 s so far"),
        ([(0, (TOKENS, 0, 8000)), (4, None)], "forced decode 0/8,000 tokens, 4 s so far"),
        ([(0, (TOKENS, 0, 8000)), (10, (TOKENS, 800, 8000))], "forced decode 800/8,000 tokens, 80/s, 1 min 30 s left"),
        ([(0, (SAMPLES, 0, 9)), (20, (SAMPLES, 9, 9))], "answers 9/9 samples, 20 s so far"),
        # a resumed run counts only its own work
        ([(0, (TOKENS, 5000, 6000)), (20, (TOKENS, 5100, 6000))], "forced decode 5,100/6,000 tokens, 5.00/s, 3 min 00 s left"),
        ([(0, ("export", 0, 3)), (25, ("export", 1, 3))], "export 1/3, 0.04/s, 50 s left"),
        # another round
        ([(0, (TOKENS, 0, 9)), (5, (TOKENS, 8, 9)), (9, (TOKENS, 0, 9))], "forced decode 0/9 tokens, 0 s so far"),
        # a task continues after another task interrupted it
        ([(0, (TOKENS, 0, 9)), (5, (SAMPLES, 1, 3)), (1, (TOKENS, 0, 9))], "forced decode 0/9 tokens, 6 s so far"),
        # between two files
        ([(0, (TOKENS, 1, 9)), (5, ("", 0, 1))], "5 s so far"),
    ],
)
def test_progress_says_how_much_how_fast_and_how_long(
    calls: list[tuple[float, tuple[str, int, int] | None]], line: str
) -> None:
    now = [100.0]
    phases = Phases("round fp8", None, lambda: now[0])
    for seconds, call in calls:
        now[0] += seconds
        if call is not None:
            phases.update(*call)
    assert describe_task(phases.task) == line


@pytest.mark.parametrize("terminal", [False, True])
def test_lines_go_on_while_nothing_moves_and_name_their_job(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds on a terminal if several jobs share it."""
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    stream = stderr(monkeypatch, terminal)
    console.begin(console.JobPlace("evaluate", "fp8", 2, 5, concurrent=terminal))
    with show_progress("round fp8 1/5") as update:
        wait_for(stream, "  job 2 of 5 fp8: round fp8 1/5: 0 s so far\n")
        update(TOKENS, 8, 9)
        wait_for(stream, "  job 2 of 5 fp8: round fp8 1/5: forced decode 8/9 tokens, ")
    console.error("seed=2: is bad")
    console.end()
    console.error("no candidate of the sweep passed")
    *_, of_the_job, of_the_sweep = stream.getvalue().splitlines()
    assert of_the_job == "pipeline: error: job 2 of 5 fp8: seed=2: is bad"
    assert of_the_sweep == "pipeline: error: no candidate of the sweep passed"


def test_brackets_of_paths_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=stream, width=160, highlight=False, color_system=None))
    console.say("engine bundle: /data/run[int8]/w[/int8]")
    console.show(Grid("fp8 of m: /data/x[/y]", [Column("a")], [["b[c] in a wide column of a table"]]))
    for text in ("engine bundle: /data/run[int8]/w[/int8]", "fp8 of m: /data/x[/y]", "b[c]"):
        assert text in stream.getvalue()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine bundle: HERE/work/artifacts/build/ab", "engine bundle: work/artifacts/build/ab"),
        ("'HERE/with space/x'", "'with space/x'"),
        ("--backend-store-uri sqlite:///HERE/work/mlflow.db", "--backend-store-uri sqlite:///work/mlflow.db"),
        ("file://HERE/work", "file://HERE/work"),
        ("/mnt/HERE/work", "/mnt/HERE/work"),
        ("HEREwork/x", "HEREwork/x"),
        ("workdir=HERE", "workdir=HERE"),
    ],
)
def test_paths_below_the_current_directory_are_relative(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert relative(text.replace("HERE", str(tmp_path))) == expected.replace("HERE", str(tmp_path))
