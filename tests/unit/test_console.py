"""Progress: how much, how fast and how long, on a terminal and where there is none."""

import doctest
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipeline.artifacts import digest
from pipeline.run.chain import Chain
from pipeline.terminal import console, phases
from pipeline.terminal.phases import Phase
from pipeline.terminal.texts import relative


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _silent_afterwards() -> Iterator[None]:
    yield
    console.close()


def stderr(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=terminal, width=160, highlight=False))
    return written


def test_a_phase_says_how_much_how_fast_and_how_long() -> None:
    clock = Clock()
    phase = Phase("round fp8", clock)
    assert phase.describe() == "0 s so far"
    clock.now += 3
    assert phase.describe() == "3 s so far"
    phase.update("forced decode [tokens]", 0, 8000)
    clock.now += 4
    assert phase.describe() == "forced decode 0/8,000 tokens, 4 s so far"
    clock.now += 6
    phase.update("forced decode [tokens]", 800, 8000)
    assert phase.describe() == "forced decode 800/8,000 tokens, 80/s, 1 min 30 s left"
    assert phase.fields() == {
        "phase": "forced decode", "unit": "tokens", "done": 800, "total": 8000, "seconds": 10, "rate": 80, "seconds_left": 90,
    }  # fmt: skip
    phase.update("answers [samples]", 3, 9)
    assert phase.describe() == "answers 3/9 samples, 0 s so far"
    phase.update("answers [samples]", 9, 9)
    clock.now += 20
    assert phase.describe() == "answers 9/9 samples, 20 s so far", "nothing is left that a rate would be of"


def test_a_resumed_phase_counts_only_what_it_did_itself() -> None:
    clock = Clock()
    phase = Phase("t", clock)
    phase.update("forced decode [tokens]", 5000, 6000)
    clock.now += 20
    phase.update("forced decode [tokens]", 5100, 6000)
    assert phase.describe() == "forced decode 5,100/6,000 tokens, 5.0/s, 3 min 00 s left"


def test_a_phase_that_another_one_interrupted_goes_on_at_its_own_rate() -> None:
    clock = Clock()
    phase = Phase("t", clock)
    phase.update("forced decode [tokens]", 0, 1000)
    clock.now += 10
    phase.update("forced decode [tokens]", 100, 1000)
    phase.update("compared [requests]", 0, 3)
    clock.now += 40
    phase.update("forced decode [tokens]", 101, 1000)
    assert phase.describe() == "forced decode 101/1,000 tokens, 10/s, 1 min 29 s left"
    phase.update("compared [requests]", 1, 3)
    assert phase.describe() == "compared 1/3 requests, 40 s each, 1 min 20 s left"
    phase.update("forced decode [tokens]", 0, 1000)
    assert phase.describe() == "forced decode 0/1,000 tokens, 0 s so far", "another round"


def test_one_thing_of_which_nothing_is_counted_has_its_time_alone() -> None:
    clock = Clock()
    phase = Phase("export", clock)
    phase.update("tracing", 0, 1)
    clock.now += 50
    assert phase.describe() == "tracing, 50 s so far"


def test_the_reading_of_a_large_file_is_a_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "LARGE", 3)
    monkeypatch.setattr(digest, "BLOCK", 2)
    monkeypatch.setattr(phases, "FIRST_SECONDS", 1000)
    for name, content in (("weights.bin", b"12345"), ("small", b"1")):
        (tmp_path / name).write_bytes(content)
    expected = digest.tree_files(tmp_path)
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr(Phase, "update", lambda _, *given: seen.append(given))
    with console.doing("reading the model's files"):
        assert digest.tree_files(tmp_path) == expected
    reading = "reading weights.bin [MiB]"
    assert seen == [(reading, 1, 2), (reading, 2, 2), (reading, 2, 2), ("", 0, 1)]


def test_steps_that_take_long_have_a_time_each() -> None:
    clock = Clock()
    phase = Phase("export", clock)
    phase.update("export", 0, 3)
    clock.now += 50
    phase.update("export", 2, 3)
    assert phase.describe() == "export 2/3, 25 s each, 25 s left"


def wait_for(written: io.StringIO, text: str) -> None:
    for _ in range(3000):
        if text in written.getvalue():
            return
        time.sleep(0.01)
    raise AssertionError(f"{text!r} is not in {written.getvalue()!r}")


def test_lines_go_on_while_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(phases, "LINE_SECONDS", 0.01)
    written = stderr(monkeypatch, terminal=False)
    console.begin(console.Job("evaluate", "fp8", 2, 5), None)
    with console.progress("round fp8 1/5") as progress:
        wait_for(written, "  job 2 of 5 fp8: round fp8 1/5: 0 s so far\n")
        progress("forced decode [tokens]", 8, 9)
        wait_for(written, "  job 2 of 5 fp8: round fp8 1/5: forced decode 8/9 tokens, ")


def test_jobs_that_share_a_terminal_write_lines_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "FIRST_SECONDS", 0.01)
    written = stderr(monkeypatch, terminal=True)
    console.begin(console.Job("evaluate", "int8", 2, 5, beside_others=True), None)
    with console.progress("build"):
        wait_for(written, "  job 2 of 5 int8: build: 0 s so far\n")


def test_what_ends_a_job_names_it_and_what_comes_after_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    console.begin(console.Job("evaluate", "int8", 2, 5), None)
    console.error("seed=2: is bad")
    console.end()
    console.error("no candidate of the sweep passed")
    assert capsys.readouterr().err.splitlines() == [
        "pipeline: error: job 2 of 5 int8: seed=2: is bad",
        "pipeline: error: no candidate of the sweep passed",
    ]


def test_what_is_done_before_the_first_artifact_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "FIRST_SECONDS", 0.01)
    written = stderr(monkeypatch, terminal=False)
    with console.doing("opening MLflow"):
        wait_for(written, "  opening MLflow: ")


def test_a_decision_between_two_rounds_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(phases, "FIRST_SECONDS", 0.01)
    written = stderr(monkeypatch, terminal=False)

    def joined(*_: object) -> Any:
        wait_for(written, "  deciding whether to ask more: ")
        return SimpleNamespace(report=None, rows=[])

    monkeypatch.setattr(Chain, "_joined", joined)
    for name in ("decide", "is_final"):
        monkeypatch.setattr(f"pipeline.run.chain.{name}", lambda *_: True)
    chain = Chain.__new__(Chain)
    chain.config = SimpleNamespace(gates=None)  # type: ignore[assignment]
    monkeypatch.chdir(tmp_path)
    assert chain._is_decided({}) is True


def test_what_takes_a_moment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "FIRST_SECONDS", 1000)
    written = stderr(monkeypatch, terminal=False)
    with console.progress("export") as progress:
        progress("export", 1, 3)
    assert written.getvalue() == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_message_is_shown_at_once(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = stderr(monkeypatch, terminal)
    with console.progress("t") as progress:
        progress("forced decode [tokens]", 1, 9)
        progress("finishing 3 samples in flight; Ctrl-C again stops at once", 0, 0)
        assert "t: finishing 3 samples in flight; Ctrl-C again stops at once" in written.getvalue()


def test_a_block_within_a_block_shows_its_messages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    written = stderr(monkeypatch, terminal=True)
    with console.progress("outer"), console.progress("inner") as progress:
        progress("reading", 1, 2)
        progress("look here", 0, 0)
    assert "inner: look here" in written.getvalue()
    assert "inner: reading" not in written.getvalue()


def test_a_terminal_gets_a_bar_with_rate_and_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    written = stderr(monkeypatch, terminal=True)
    console.begin(console.Job("evaluate", "fp8", 2, 5), None)
    with console.progress("round fp8") as progress:
        progress("forced decode [tokens]", 0, 8000)
        progress("forced decode [tokens]", 1200, 8000)
    shown = written.getvalue()
    assert "job 2 of 5: round fp8: forced decode" in shown
    assert "1,200/8,000 tokens" in shown
    assert "/s" in shown


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_a_bar_shows_every_number_whole_and_the_time_that_is_left_at_every_width(width: int) -> None:
    written, clock = io.StringIO(), Clock()
    terminal = Console(file=written, force_terminal=True, width=width, color_system=None)
    phase = Phase("round", clock)
    with phases.bar(terminal, "job 12 of 24: round int4_streaming 1/5", phase, print) as update:
        update("forced decode [tokens]", 0, 123_456)
        clock.now += 7
        update("forced decode [tokens]", 12_345, 123_456)
    lines = re.sub(r"\x1b\[[\d?]*[a-zA-Z]", "\n", written.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(" ".join(lines).replace("\N{BOX DRAWINGS HEAVY HORIZONTAL}", "").split())
    said = "job 12 of 24: round int4_streaming 1/5: forced decode 12,345/123,456 tokens, 1,764/s, 1 min 03 s left"
    assert said in shown


def test_the_second_job_says_how_long_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr("pipeline.terminal.console.time", SimpleNamespace(monotonic=clock))
    console.begin(console.Job("all", "fp8", 1, 5), " of tiny")
    clock.now += 60
    console.begin(console.Job("all", "int8", 2, 5), " of tiny")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "job 1 of 5: all fp8 of tiny"
    assert second == "job 2 of 5: all int8 of tiny; 1 done in 1 min 00 s, about 4 min 00 s left"


def test_a_job_whose_predecessors_ran_elsewhere_guesses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console.begin(console.Job("all", "fp8", 1, 5), "")
    console.begin(console.Job("all", "int8", 4, 5), "")
    assert capsys.readouterr().out.splitlines()[-1] == "job 4 of 5: all int8"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine bundle: HERE/work/artifacts/build/ab", "engine bundle: work/artifacts/build/ab"),
        ("bundle=HERE/x: no such directory", "bundle=x: no such directory"),
        ("'HERE/with space/x'", "'with space/x'"),
        ("--backend-store-uri sqlite:///HERE/work/mlflow.db", "--backend-store-uri sqlite:///work/mlflow.db"),
        ("file://HERE/work", "file://HERE/work"),
        ("/mnt/HERE/work", "/mnt/HERE/work"),
        ("HEREwork/x", "HEREwork/x"),
        ("workdir=HERE", "workdir=HERE"),
        ("/elsewhere/x", "/elsewhere/x"),
    ],
)
def test_paths_below_the_current_directory_are_relative(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert relative(text.replace("HERE", str(tmp_path))) == expected.replace("HERE", str(tmp_path))


def test_the_examples_of_the_module_hold() -> None:
    assert doctest.testmod(phases).failed == 0


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


def test_a_terminal_wraps_sentences_between_words_and_commands_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    written, path = io.StringIO(), "/a/path/" + "x" * 40
    terminal = Console(file=written, force_terminal=True, width=40, highlight=False, color_system=None)
    monkeypatch.setattr(console, "out", terminal)
    console.say(f"  not fp8: passed, but the same memory holds fewer tokens (1,048,576 against 1,369,088), says {path}")
    console.say("python -m pipeline stage=evaluate kv=fp8 model.path=/models/Qwen3-0.6B", paste=True)
    lines = [line.rstrip() for line in written.getvalue().splitlines()]
    assert lines == [
        "  not fp8: passed, but the same memory",
        "  holds fewer tokens (1,048,576 against",
        "  1,369,088), says",
        f"  {path}",
        "python -m pipeline stage=evaluate kv=fp8 model.path=/models/Qwen3-0.6B",
    ]


def test_where_there_is_no_terminal_a_sentence_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("word " * 60)
    assert capsys.readouterr().out.count("\n") == 1
