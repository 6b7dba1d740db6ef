"""Sweeps by submitit's Slurm executor over a stand-in for Slurm: the script, the verdicts, order and exit codes, preemption."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm import Slurm, slurm
from sweeps import ended, started, sweep, wait_for

SLURM = (
    "hydra/launcher=submitit_slurm",
    "hydra.launcher.partition=gpu",
    "hydra.launcher.gpus_per_node=1",
    "hydra.launcher.array_parallelism=2",
)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    with slurm(tmp_path / "slurm", monkeypatch) as running:
        yield running


def test_an_array_job_gives_the_verdicts_order_and_exit_code_of_the_basic_launcher(cluster: Slurm, tmp_path: Path) -> None:
    swept = sweep(
        tmp_path,
        "0,5,3,2,4",
        *SLURM,
        "hydra.launcher.timeout_min=120",
        "hydra.launcher.mem_gb=4",
        "hydra.launcher.constraint='[a|b]'",
    )
    assert swept.code == 2, swept.stderr
    assert swept.names == ["fp8 seed=0", "fp8 seed=5", "fp8 seed=3"]
    assert swept.summary["exit_codes"] == {"1": 0, "2": 0, "3": 3, "4": 2, "5": 4} | swept.summary["exit_codes"]
    assert swept.stderr.count("job 4 of 5 fp8 seed=2: seed=2: is bad input that shows late") == 1, swept.stderr
    assert swept.stderr.count("job 5 of 5 fp8 seed=4: seed=4: is missing here") == 1, swept.stderr
    asked = cluster.asked()
    assert asked["array"] == "0-4%2"
    assert (asked["partition"], asked["gpus_per_node"], asked["time"], asked["mem"]) == ("gpu", "1", "120", "4GB")
    assert (asked["constraint"], asked["nodes"], asked["ntasks_per_node"]) == ("[a|b]", "1", "1")


def test_a_killed_job_is_named_the_others_go_on_and_running_it_again_goes_on(cluster: Slurm, tmp_path: Path) -> None:
    swept = sweep(tmp_path, "9,0,5", *SLURM)
    assert swept.code == 4, swept.stderr
    assert "hydra/launcher=submitit_slurm: the process of a job died" in swept.stderr
    assert "jobs that Slurm has go on" in swept.stderr
    wait_until(lambda: cluster.states() == ["FAILED", "COMPLETED", "COMPLETED"], cluster)
    again = sweep(tmp_path, "3,0,5", *SLURM)
    assert (again.code, again.names) == (0, ["fp8 seed=3", "fp8 seed=0", "fp8 seed=5"])


def test_a_preempted_job_is_requeued_and_counts_as_it_ended_last(cluster: Slurm, tmp_path: Path) -> None:
    with started(tmp_path, "16,5", "tracking=none", *SLURM) as process:
        wait_for(tmp_path, "waits-*")
        for number in ("SIGTERM", "SIGUSR2"):  # as Slurm sends them
            cluster.run("scancel", "1001_0", "--signal", number)
        swept = ended(tmp_path, process)
    assert swept.code == 0, swept.stderr
    assert swept.names == ["fp8 seed=16", "fp8 seed=5"]
    assert swept.summary["exit_codes"] == {"1": 0, "2": 0}
    assert cluster.states() == ["COMPLETED", "COMPLETED"]


def test_a_job_that_runs_out_of_its_time_is_no_defect(cluster: Slurm, tmp_path: Path) -> None:
    with started(tmp_path, "15,5", "tracking=none", *SLURM, "hydra.launcher.timeout_min=5") as process:
        wait_for(tmp_path, "waits-*")
        cluster.run("scancel", "1001_0", "--signal", "SIGUSR2")  # signal_delay_s before its end
        swept = ended(tmp_path, process)
    assert swept.code == 4, swept.stderr
    assert "job 1 of 2 fp8 seed=15: the cluster ended this job (" in swept.stderr
    assert "raise hydra.launcher.timeout_min" in swept.stderr
    assert swept.names == ["fp8 seed=5"]


def test_ctrl_c_leaves_the_jobs_to_slurm_and_they_record_how_they_end(cluster: Slurm, tmp_path: Path) -> None:
    with started(tmp_path, "16,5", "tracking=none", *SLURM) as process:
        wait_for(tmp_path, "waits-*")
        process.send_signal(signal.SIGINT)
        swept = ended(tmp_path, process, 100)
    assert swept.code == 130, swept.stderr
    assert "jobs that Slurm has go on; scancel ends them" in swept.stderr
    assert cluster.states()[0] == "RUNNING"
    cluster.run("scancel", "1001_0", "--signal", "SIGUSR2")  # it ends once it is requeued
    wait_until(lambda: cluster.states() == ["COMPLETED", "COMPLETED"], cluster)
    summary = json.loads((tmp_path / "work" / "summary.json").read_text())
    assert summary["exit_codes"] == {"1": 0, "2": 0}
    assert [candidate["name"] for candidate in summary["candidates"]] == ["fp8 seed=16", "fp8 seed=5"]


def test_what_sbatch_refuses_is_said_and_is_no_dead_job(cluster: Slurm, tmp_path: Path) -> None:
    swept = sweep(tmp_path, "0,5", *SLURM, "hydra.launcher.partition=nope")
    assert swept.code == 4, swept.stderr
    assert "hydra/launcher=submitit_slurm: sbatch failed (" in swept.stderr
    assert "Invalid partition name specified" in swept.stderr
    assert "died" not in swept.stderr
    assert "go on" not in swept.stderr.replace("run it again to go on", "")
    assert not list(cluster.folder.glob("*.sh"))


def wait_until(reached: Callable[[], bool], cluster: Slurm) -> None:
    end = time.monotonic() + 100
    while not reached():
        assert time.monotonic() < end, cluster.states()
        time.sleep(0.1)
