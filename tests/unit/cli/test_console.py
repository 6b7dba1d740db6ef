"""The console's output: progress, jobs, errors and sentences, with and without a terminal, and in each mode of `log=`."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_input.forks import BadInput, CommandResult, RunCase
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


ROOT = Path(__file__).resolve().parents[3]

NOISE = """
import logging, os, sys, warnings
os.environ["DB_PASSWORD"] = 'ab"cdef'  # escaped in JSON
from pipeline.cli import console
from pipeline.cli.progress import show_progress
from pipeline.cli.console import Column, Grid
from stages.core.streams import redact_output
redact_output()
console.configure("json")
console.begin(console.JobPlace("evaluate", "fp8", 2, 5), "tiny")
warnings.warn("deprecated")
logging.getLogger("other").warning("logged by a library with hf_abcdefghijklmnopqrstuvwxyz")
logging.getLogger("other").warning("%d files", "not a number")
logging.getLogger("kvgate.waits").warning("waiting for a lock")
console.say(console.styled("bold", "a sentence", ' for ab"cdef in [colour]'))
console.show(Grid("comparison", [Column("policy"), Column("KL", ".1e")], [["fp8", float("nan")], ["", 0.25]]))
with show_progress("round fp8") as progress:
    progress("look at this", 0, 0)
console.step("round fp8", "/somewhere", 1.5)
console.warning("beware")
console.error("it failed", exit_code=2)
os.environ["KVGATE_DEBUG"] = "1"
console.ended_by(KeyError("planted"))
console.close()
print("printed by a library: hf_abcdefghijklmnopqrstuvwxyz", file=sys.stderr)
"""


def test_results_go_to_stdout_and_everything_else_to_stderr() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", NOISE], check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    *lines, printed = completed.stderr.splitlines()
    assert printed == "printed by a library: ***"
    job = {"stage": "evaluate", "policy": "fp8", "job": 2, "jobs": 5}.items()
    sentence, table = map(json.loads, completed.stdout.splitlines())
    assert sentence["result"] == "a sentence for *** in [colour]"
    assert (table["result"], table.pop("rows")) == ("comparison", [["policy", "KL"], ["fp8", "-"], ["", "2.5e-01"]])
    assert job <= table.items()
    events = list(map(json.loads, lines))
    by_message = {line["message"]: line for line in events}
    assert {line["level"] for line in events} == {"info", "warning", "error"}
    assert by_message["logged by a library with ***"]["level"] == "warning"
    assert by_message["%d files"]["level"] == "warning", "the arguments of the library's call do not match its format"
    assert any("deprecated" in message for message in by_message)
    assert by_message["waiting for a lock"]["level"] == "warning"
    assert by_message["round fp8: look at this"]["step"] == "round fp8"
    assert job <= by_message["job 2 of 5: evaluate fp8 of tiny"].items()
    assert by_message["round fp8 1.5 s /somewhere"]["step"] == "round fp8"
    assert {"level": "error", "exit_code": 2, "job": 2}.items() <= by_message["it failed"].items()
    assert by_message["where it came from"]["traceback"] == "KeyError: 'planted'"
    assert all(line["time"].endswith("Z") for line in events)


CAPACITY = ("stage=capacity", "capacity.weights_gib=1")
"""A stage that shows results in a second, because counting the weights would import torch."""


def outcome(run_case: RunCase, folder: Path, *arguments: str, runs_stage: bool = False) -> CommandResult:
    return run_case(BadInput("", arguments, (), runs_stage=runs_stage), folder)


@pytest.mark.parametrize("arguments", [("-m", "kv=fp8,fp9", "log=json"), ("log=json", "kv.sink_tokens=-1", "seed=-1")])
def test_early_errors_follow_the_log_mode(arguments: tuple[str, ...], run_case: RunCase, tmp_path: Path) -> None:
    result = outcome(run_case, tmp_path, *arguments)
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert lines
    assert {(line["level"], line["exit_code"]) for line in lines if "step" not in line} == {("error", 2)}
    assert (result.code, result.stdout) == (2, "")


PRINTS = """
import os
from pipeline import __main__
__main__._plan_command = lambda argv: print("result") or 0 * os.write(1, b"noise")
__main__.main()
"""


def test_what_native_code_of_a_library_prints_is_not_on_stdout() -> None:
    completed = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (completed.stdout, completed.stderr) == ("result\n", "noise")


def test_results_with_other_characters_are_escaped() -> None:
    code = "from stages.core.streams import reserve_stdout; reserve_stdout(); print('modèle')"
    ascii_output = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", code], env=ascii_output, capture_output=True, check=True)
    assert result.stdout == b"mod\\xe8le\n"


def test_a_whole_command_prints_its_results_in_each_mode(run_case: RunCase, tmp_path: Path) -> None:
    modes = ("human", "quiet", "json")
    shown, quiet, objects = (outcome(run_case, tmp_path, *CAPACITY, f"log={mode}", runs_stage=True) for mode in modes)
    assert quiet.stderr == ""
    assert "What the memory holds" in quiet.stdout
    assert "capacity fp8 of pkg://stages.tiny/checkpoint" in shown.stderr.splitlines()
    assert shown.stdout == quiet.stdout
    assert "work/capacity.json" in shown.stdout.splitlines(), "paths are relative to the current directory"
    assert str(tmp_path) not in shown.stdout
    assert objects.code == 0, objects.stderr
    assert "What the memory holds" in {json.loads(line)["result"] for line in objects.stdout.splitlines()}
    assert all(isinstance(json.loads(line), dict) for line in objects.stderr.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cfg", "job", "-m", "kv=fp8,int8"), "# job 2 of 2: kv=int8\n"),
        (("--version",), "kvgate "),
        (("-sc", "install=bash"), "complete -o nospace"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_option_shows_its_output_and_writes_nothing(
    arguments: tuple[str, ...], message: str, run_case: RunCase, tmp_path: Path
) -> None:
    result = outcome(run_case, tmp_path, *arguments)
    assert result.code == 0, result.stderr
    assert message in result.stdout
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)  # like `head` after it has ended
    with os.fdopen(writes, "w") as closed:
        completed = subprocess.run(
            [sys.executable, "-m", "pipeline", *CAPACITY, "log=json"],
            check=False, stdout=closed, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert completed.returncode == 0
    assert not [line for line in completed.stderr.splitlines() if '"level": "info"' not in line]
    assert (tmp_path / "work" / "capacity.json").is_file(), "the work finishes"
