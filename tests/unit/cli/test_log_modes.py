"""`log=human|json|quiet`: the contents of stdout and stderr. With json, every line of kvgate is an object."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input.forks import BadInput, CommandResult, RunCase

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
