"""Sweeps with every installed launcher: verdicts, order, exit codes, output, killed workers and interrupts.

Every job is a small evaluation whose seed selects the outcome (`helpers/commands/small_sweeps/sitecustomize.py`).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.commands.processes import await_none_with

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"

LAUNCHERS = {
    "basic": (),
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    "submitit_local": ("hydra/launcher=submitit_local",),
    "ray": ("hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"),
}
INSTALLED = [name for name in LAUNCHERS if name != "ray" or find_spec("ray") is not None]
MULTIPROCESS = [name for name in INSTALLED if name != "basic"]
"""Launchers that run jobs in separate processes."""

SWEEPS = [
    ("0,5,6", 0, {"fp8 seed=0": "PASS", "fp8 seed=5": "PASS", "fp8 seed=6": "INCONCLUSIVE"}, []),
    ("6,3", 3, {"fp8 seed=6": "INCONCLUSIVE", "fp8 seed=3": "FAIL"}, ["pipeline: error: no candidate of the sweep passed"]),
    (
        "0,4,2,3",
        2,
        {"fp8 seed=0": "PASS", "fp8 seed=3": "FAIL"},
        ["job 2 of 4 fp8 seed=4: seed=4: is missing here", "job 3 of 4 fp8 seed=2: seed=2: is bad input that shows late"],
    ),
    ("1,2", 1, {}, ["job 1 of 2 fp8 seed=1: a defect of kvgate (RuntimeError: planted)"]),
]
"""(seeds, exit code, verdicts, messages). The third case runs with every launcher."""


@dataclass(frozen=True)
class SweepOutcome:
    """Result of a sweep."""

    code: int
    stdout: str
    stderr: str
    summary: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """Names of the candidates."""
        return [candidate["name"] for candidate in self.summary["candidates"]]


@contextmanager
def start_sweep(folder: Path, seeds: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a sweep over seeds in `folder`, with output to the files `stdout` and `stderr` there."""
    path = os.pathsep.join(map(str, (ROOT, TESTS, TESTS / "helpers" / "commands" / "small_sweeps")))
    inherited = os.environ.get("PYTHONPATH")  # a launcher may be installed there
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{inherited}" if inherited else path, "HOME": str(folder)}
    command = [sys.executable, "-m", "pipeline", "-m", "stage=evaluate", f"seed={seeds}", *arguments]
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, text=True, env=environment)
        try:
            yield process
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.wait()


def wait_for_end(folder: Path, process: subprocess.Popen[str], seconds: float = 500) -> SweepOutcome:
    """Wait for the end of a sweep, and assert that all of its processes have ended."""
    code = process.wait(seconds)
    await_none_with(folder)
    summary = json.loads((folder / "work" / "summary.json").read_text())
    return SweepOutcome(code, (folder / "stdout").read_text(), (folder / "stderr").read_text(), summary)


def sweep(folder: Path, seeds: str, *arguments: str) -> SweepOutcome:
    """Run an untracked sweep over seeds in `folder`."""
    with start_sweep(folder, seeds, "tracking=none", *arguments) as process:
        return wait_for_end(folder, process)


def wait_for(folder: Path, pattern: str, count: int = 1, seconds: float = 300) -> list[Path]:
    """Wait until `count` files below the work directory match; return the matches."""
    end = time.monotonic() + seconds
    while len(matches := sorted((folder / "work").glob(pattern))) < count:
        assert time.monotonic() < end, (folder / "stderr").read_text()
        time.sleep(0.1)
    return matches


@pytest.mark.parametrize(
    ("launcher", "seeds", "code", "candidates", "messages"),
    [(launcher, *case) for launcher in INSTALLED for case in (SWEEPS if launcher == "basic" else SWEEPS[2:3])],
)
def test_every_launcher_gives_the_same_verdicts_and_exit_code(
    launcher: str, seeds: str, code: int, candidates: dict[str, str], messages: list[str], tmp_path: Path
) -> None:
    swept = sweep(tmp_path, seeds, *LAUNCHERS[launcher])
    assert swept.code == code, swept.stderr
    verdicts = [(candidate["name"], candidate["verdict"]) for candidate in swept.summary["candidates"]]
    assert verdicts == list(candidates.items())
    assert (swept.summary["exit_code"], len(swept.summary["exit_codes"])) == (code, len(swept.summary["names"]))
    for line in messages:
        assert swept.stderr.count(line) == 1, swept.stderr
    if not launcher.startswith("submitit"):  # submitit writes the output of jobs to files
        assert sum(line.startswith("judged ") for line in swept.stdout.splitlines()) == len(candidates), swept.stdout
    if launcher != "ray":  # ray prints the native output of workers on stdout
        assert "noise" not in swept.stdout


@pytest.mark.parametrize("launcher", MULTIPROCESS)
def test_a_killed_worker_is_reported_and_a_second_run_completes_the_sweep(launcher: str, tmp_path: Path) -> None:
    swept = sweep(tmp_path, "5,9", *LAUNCHERS[launcher])
    assert (swept.code, swept.summary["exit_code"]) == (4, 4), swept.stderr
    assert ": the process of a job died" in swept.stderr
    assert re.search(r"did not finish: [01] of 2 jobs ended, missing .*job 2 \(fp8 seed=9\); run it again", swept.stderr)
    again = sweep(tmp_path, "5,3", *LAUNCHERS[launcher])
    assert (again.code, again.names) == (0, ["fp8 seed=5", "fp8 seed=3"])


@pytest.mark.parametrize(
    ("launcher", "number"), list(zip(MULTIPROCESS, (signal.SIGINT, signal.SIGTERM, signal.SIGINT), strict=False))
)
def test_an_interrupt_ends_all_workers_and_the_command_with_130(launcher: str, number: signal.Signals, tmp_path: Path) -> None:
    with start_sweep(tmp_path, "5,15,16", "tracking=none", *LAUNCHERS[launcher]) as process:
        wait_for(tmp_path, "waits-*", 2)  # two jobs at once
        process.send_signal(number)
        swept = wait_for_end(tmp_path, process, 100)
    assert (swept.code, swept.summary["exit_code"]) == (130, 130), swept.stderr
    assert "jobs ended, missing " in swept.stderr
    assert swept.stderr.endswith("pipeline: error: interrupted; finished work is kept; run it again to continue\n")
