"""Progress: how much, how fast and how long, on a terminal and where there is none."""

import doctest
import io
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.terminal import console


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    return clock


def stderr(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=terminal, width=60, highlight=False))
    return written


def test_lines_say_how_much_how_fast_and_how_long_every_ten_seconds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    written = stderr(monkeypatch, terminal=False)
    with console.progress("round fp8 1/5") as progress:
        progress("forced decode [tokens]", 0, 8000)
        for done in (85, 800, 1200):
            clock.now += 5
            progress("forced decode [tokens]", done, 8000)
        clock.now += 8
        progress("answers [samples]", 3, 9)
        clock.now += 2
        progress("answers [samples]", 4, 9)
    assert written.getvalue().splitlines() == [
        "  round fp8 1/5: forced decode 800/8,000 tokens, 80/s, 1 min 30 s left",
        "  round fp8 1/5: answers 3/9 samples",
    ]


def test_a_resumed_phase_counts_only_what_it_did_itself(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    written = stderr(monkeypatch, terminal=False)
    with console.progress("t") as progress:
        progress("forced decode [tokens]", 5000, 6000)
        clock.now += 20
        progress("forced decode [tokens]", 5100, 6000)
    assert written.getvalue() == "  t: forced decode 5,100/6,000 tokens, 5.0/s, 3 min 00 s left\n"


def test_steps_without_a_unit_have_no_rate(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    written = stderr(monkeypatch, terminal=False)
    with console.progress("export") as progress:
        progress("export", 0, 3)
        clock.now += 50
        progress("export", 2, 3)
    assert written.getvalue() == "  export: export 2/3, 25 s left\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_message_is_shown_at_once(terminal: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock.now
    written = stderr(monkeypatch, terminal)
    with console.progress("t") as progress:
        progress("forced decode [tokens]", 1, 9)
        progress("finishing 3 samples in flight; Ctrl-C again stops at once", 0, 0)
        assert "t: finishing 3 samples in flight; Ctrl-C again stops at once" in written.getvalue()


def test_a_terminal_gets_a_bar_with_rate_and_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    written = stderr(monkeypatch, terminal=True)
    monkeypatch.setattr(console.err, "_width", 160)
    with console.progress("round fp8") as progress:
        progress("forced decode [tokens]", 0, 8000)
        progress("forced decode [tokens]", 1200, 8000)
    shown = written.getvalue()
    assert "round fp8: forced decode" in shown
    assert "1,200/8,000 tokens" in shown
    assert "/s" in shown


def test_lines_of_a_sweeps_job_name_it(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    written = stderr(monkeypatch, terminal=False)
    monkeypatch.setattr(console, "job", console.Job("job 2 of 5 int8: "))
    with console.progress("round int8 1/5") as progress:
        progress("forced decode [tokens]", 0, 8000)
        clock.now += 10
        progress("forced decode [tokens]", 800, 8000)
    assert written.getvalue().startswith("  job 2 of 5 int8: round int8 1/5: forced decode 800/8,000 tokens")


def test_jobs_that_share_a_terminal_write_lines_into_it(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    written = stderr(monkeypatch, terminal=True)
    monkeypatch.setattr(console, "job", console.Job("job 2 of 5 int8: ", beside_others=True))
    with console.progress("build") as progress:
        clock.now += 10
        progress("build", 1, 3)
    assert written.getvalue() == "  job 2 of 5 int8: build: build 1/3\n"


def test_the_examples_of_the_module_hold() -> None:
    assert doctest.testmod(console).failed == 0


def test_a_written_report_is_what_was_printed_without_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "out", Console(file=io.StringIO(), force_terminal=True))
    console.out.print("before")
    with console.written_to(tmp_path / "report.txt"):
        console.out.print("[green]PASS[/] fp8")
    console.out.print("after")
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == "PASS fp8\n"


def test_a_report_that_fails_half_way_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "out", Console(file=io.StringIO()))

    def fail() -> None:
        with console.written_to(tmp_path / "report.txt"):
            console.out.print("half")
            raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        fail()
    with console.written_to(tmp_path / "report.txt"):
        console.out.print("whole")
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == "whole\n"
