"""Launchers of sweeps: refusals and exceptions of jobs, Ray's start, and ended workers."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pickle import PicklingError
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.refusals import refused
from submitit.core.utils import FailedJobError, UncompletedJobError

from pipeline.chain import command, launchers, stage_functions
from pipeline.cli import console
from pipeline.config.compose import plan
from pipeline.registry import summary
from pipeline.registry.summary import Summary
from stages.core.errors import GateRefusal, MissingRequirement, UserError, describe, exit_code

JOBLIB = ["kv=fp8,int8", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]


def test_a_launchers_job_returns_its_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = GateRefusal("FP16 itself answers none\ncopy-1: asked ...")
    monkeypatch.setitem(stage_functions.FUNCTIONS, "all", Mock(side_effect=refusal))
    planned = plan([f"workdir={tmp_path}", "tracking=none", *JOBLIB], multirun=True)
    ended = launchers.launch(planned, command.JobRunner("20260101", planned.names, ()))
    assert [(end.code, end.message) for end in ended] == [(3, "FP16 itself answers none\ncopy-1: asked ...")] * 2
    assert summary.load(tmp_path, "20260101").exit_codes == {1: 3, 2: 3}
    assert "job 2 of 2 int8: FP16 itself answers none" in capsys.readouterr().err
    console.close()


@pytest.mark.parametrize("error", [TypeError("cannot pickle"), PicklingError("of a task"), UserError("bad input")], ids=str)
def test_refusals_and_unpicklable_jobs_are_no_launcher_failure(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, launchers.launcher_errors("joblib"):
        raise error
    assert caught.value is error


INTERRUPTED = """
import subprocess, sys
import psutil
from joblib.externals.loky.backend import resource_tracker
from pipeline.chain.launchers import end_workers
resource_tracker.ensure_running()
sleeps = [sys.executable, "-c", "import time; time.sleep(100)"]
before, worker = subprocess.Popen(sleeps), subprocess.Popen(sleeps)
end_workers([psutil.Process(before.pid)])
alive = psutil.Process().children()
print(sorted("tracker" if "resource_tracker" in " ".join(child.cmdline()) else str(child.pid == before.pid) for child in alive))
before.kill()
"""


def test_only_workers_are_ended() -> None:
    """Resource trackers clean up after workers, and other processes of the caller are not the launcher's."""
    completed = subprocess.run([sys.executable, "-c", INTERRUPTED], check=True, capture_output=True, text=True, timeout=100)
    assert completed.stdout == "['True', 'tracker']\n"


RAYS = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", *launchers.RAY_LINES, *launchers.RAY_HERE)


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """A stand-in for `ray.init`, and an environment without Ray's variables. Restores both and the SIGTERM handler afterwards.

    Like the real function, it installs its own SIGTERM handler.
    """
    for name in RAYS:
        monkeypatch.setenv(name, "")  # registers the variable so that it is restored
        monkeypatch.delenv(name)
    stand_in = Mock(side_effect=lambda **_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=stand_in))
    before = signal.getsignal(signal.SIGTERM)
    yield stand_in
    signal.signal(signal.SIGTERM, before)


def test_the_commands_ray_listens_locally_behind_a_token(init: Mock) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    launchers.start_ray({"ray": {"init": {"address": None, "num_cpus": 2}}})
    assert "++hydra.launcher.ray.remote.max_retries=0" in launchers.RAY_OVERRIDES, "a job that died is not run again"
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler, "Ray's would abort the command"
    options = init.call_args.kwargs
    assert options["address"] == "local", "the command must not join another Ray instance on this machine"
    assert (options["num_cpus"], options["include_dashboard"]) == (2, False)
    assert "kvgate-ray-" in str(options["_temp_dir"]), "the folder of Ray's logs and sockets is removed with the command"
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert (os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"])) == ("token", 64)


@pytest.mark.parametrize("place", ["key", "variable"])
def test_a_ray_cluster_keeps_its_own_settings(place: str, init: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "variable":
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    launchers.start_ray({"ray": {"init": {"address": "10.0.0.1:6379" if place == "key" else None}}})
    assert set(init.call_args.kwargs) <= {"address", "logging_level"}, "Ray refuses other options for a cluster that it joins"
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", *launchers.RAY_HERE} & set(os.environ)


def test_ray_start_failure_is_a_missing_requirement(init: Mock) -> None:
    init.side_effect = Exception("The current node timed out during startup. This could happen because\nmore")
    with refused(MissingRequirement, "hydra/launcher=ray: Ray did not start (Exception: The current node timed out during"):
        launchers.start_ray({})


SBATCH = "sbatch: error: invalid partition: nope\nsbatch: error: submission failed\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FailedJobError("Traceback\n  File\nOSError: no folder\n"), r"failed \(OSError: no folder\); free some"),
        (FailedJobError(SBATCH), "invalid partition: nope sbatch: error: submission failed"),
    ],
)
def test_a_launchers_exception_becomes_a_refusal_in_one_line(error: Exception, message: str) -> None:
    cause = subprocess.CalledProcessError(1, ["sbatch"], stderr=SBATCH) if "sbatch" in str(error) else None
    with pytest.raises(MissingRequirement, match=message) as caught, launchers.launcher_errors("slurm"):
        raise error from cause
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


NO_JOBS: dict[str, tuple[type[Exception], str, str]] = {
    "joblib": (UserError, "", "n_jobs == 0 in Parallel has no meaning; correct hydra.launcher.*"),
    "ray": (MissingRequirement, "", "Ray did not start"),
}


@pytest.mark.parametrize("launcher", NO_JOBS)
def test_a_launcher_that_starts_no_job_keeps_the_last_sweep_and_report(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = MissingRequirement("hydra/launcher=ray: Ray did not start")
    monkeypatch.setattr(launchers, "start_ray", Mock(side_effect=refusal))
    last, kept = Summary(sweep="20260101").model_dump_json(), ("summary.json", "report.html", "summaries/20260101.json")
    for name in kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(last)
    arguments = ["kv=fp8,int8", f"workdir={tmp_path}", "hydra/launcher=joblib", "hydra.launcher.n_jobs=0"]
    with refused(*NO_JOBS[launcher]):
        command.run(replace(plan(arguments, multirun=True), launcher=launcher), "20260102")
    assert {(tmp_path / name).read_text() for name in kept} == {last}
    assert not (tmp_path / "summaries" / "20260102.json").exists()


def test_a_job_that_the_cluster_ends_may_continue() -> None:
    error = UncompletedJobError("Job not requeued because: timed-out too many times.")
    assert exit_code(error) == 4
    assert re.fullmatch(
        r"the cluster ended this job \(.*too many times.\); raise hydra.launcher.timeout_min, .*", describe(error)
    )
