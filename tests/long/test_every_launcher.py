"""The same sweeps by every launcher: verdicts, order, exit codes, what is said; killed workers, interrupts, and going on."""

import os
import re
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from sweeps import JOBLIB, RAY, SUBMITIT, ended, started, sweep, wait_for

LAUNCHERS = {
    "basic": (),
    "joblib": JOBLIB,
    "submitit_local": SUBMITIT,
    "ray": RAY,
}
VERDICTS = {"0": "PASS", "5": "PASS", "3": "FAIL", "6": "INCONCLUSIVE"}
"""By the seeds of `small_sweeps/sitecustomize.py` that are judged."""
EVERY = os.environ.get("REQUIRE_RAY") == "1"
"""Whether Ray, which takes half a minute to start, runs every sweep, and is no reason to skip where it is missing."""
OF_RAY = ("0,4,2,3", signal.SIGTERM)
"""What it runs otherwise."""


def _arguments(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """A launcher's arguments, where its case runs here."""
    if request.param == "ray" and not EVERY:
        if find_spec("ray") is None or find_spec("hydra_plugins.hydra_ray_launcher") is None:
            pytest.skip("ray is missing: pip install 'kvgate[ray]'")
        case = request.node.callspec.params
        if case.get("seeds", case.get("number", OF_RAY[0])) not in OF_RAY:
            pytest.skip("REQUIRE_RAY=1 runs every sweep by Ray")
    return LAUNCHERS[request.param]


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """A launcher's arguments."""
    return _arguments(request)


@pytest.fixture(params=[name for name in LAUNCHERS if name != "basic"])
def beside(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Those of a launcher whose jobs run in processes of their own."""
    return _arguments(request)


@pytest.mark.parametrize(
    ("seeds", "code", "names", "said"),
    [
        ("0,5", 0, ["fp8 seed=0", "fp8 seed=5"], []),
        ("3", 3, ["fp8"], ["pipeline: error: no candidate of the sweep passed"]),
        ("5,3", 0, ["fp8 seed=5", "fp8 seed=3"], []),
        ("6,3", 3, ["fp8 seed=6", "fp8 seed=3"], ["pipeline: error: no candidate of the sweep passed"]),
        (
            "0,4,2,3",
            2,
            ["fp8 seed=0", "fp8 seed=3"],
            ["job 2 of 4 fp8 seed=4: seed=4: is missing here", "job 3 of 4 fp8 seed=2: seed=2: is bad input that shows late"],
        ),
        ("4,3", 4, ["fp8 seed=3"], ["job 1 of 2 fp8 seed=4: seed=4: is missing here", "no candidate of the sweep passed"]),
        ("1,2", 1, [], ["job 1 of 2 fp8 seed=1: a defect of kvgate (RuntimeError: planted)"]),
    ],
)
def test_every_launcher_gives_the_same_verdicts_order_and_exit_code(
    launcher: tuple[str, ...], seeds: str, code: int, names: list[str], said: list[str], tmp_path: Path
) -> None:
    swept = sweep(tmp_path, seeds, *launcher)
    assert swept.code == code, swept.stderr
    assert swept.names == names
    verdicts = [VERDICTS[seed] for seed in seeds.split(",") if seed in VERDICTS]
    assert [candidate["verdict"] for candidate in swept.summary["candidates"]] == verdicts
    assert (swept.summary["exit_code"], swept.summary["ended"]) == (code, swept.summary["jobs"])
    for line in said:
        assert swept.stderr.count(line) == 1, swept.stderr


def test_a_killed_worker_is_named_and_running_it_again_goes_on(beside: tuple[str, ...], tmp_path: Path) -> None:
    swept = sweep(tmp_path, "5,9", *beside)
    assert swept.code == 4, swept.stderr
    assert swept.summary["exit_code"] == 4
    assert ": the process of a job died" in swept.stderr
    assert re.search(r"did not finish: [01] of 2 jobs ended, not .*job 2 \(fp8 seed=9\); run it again", swept.stderr)
    again = sweep(tmp_path, "5,3", *beside)
    assert (again.code, again.names) == (0, ["fp8 seed=5", "fp8 seed=3"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_workers_and_the_command_with_130(
    beside: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    with started(tmp_path, "5,15,15", "tracking=none", *beside) as process:
        waiting = wait_for(tmp_path, "waits-*")
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        swept = ended(tmp_path, process, 100)
    assert swept.code == 130, swept.stderr
    assert "jobs ended, not " in swept.stderr
    assert swept.stderr.endswith("pipeline: interrupted; what was finished is kept, run it again to go on\n")
    assert swept.summary["exit_code"] == 130
    end = time.monotonic() + 30
    while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        assert time.monotonic() < end, [worker for worker in workers if worker.is_running()]
        time.sleep(0.2)
    assert not [path for path in waiting if psutil.pid_exists(int(path.name.partition("-")[2]))]
    again = sweep(tmp_path, "5,3", *beside)
    assert (again.code, again.names) == (0, ["fp8 seed=5", "fp8 seed=3"])


def test_a_stage_that_judges_nothing_fails_in_a_worker_as_it_does_here(beside: tuple[str, ...], tmp_path: Path) -> None:
    """Its sweep leaves no summary of its own, and the last exit code in summary.json."""
    swept = sweep(tmp_path, "5,7", *beside, "stage=recommend")
    assert swept.code == 2, swept.stderr
    assert swept.stderr.count("stage=recommend: looks at every policy in one run") == 2
    assert swept.summary["exit_code"] == 2
    assert list((tmp_path / "work" / "summaries").glob("*.json")) == []
