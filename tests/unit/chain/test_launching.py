"""Tests of launchers: advice and exceptions of jobs, errors of the launchers themselves, Ray's start, and ended workers."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pickle import PicklingError

import pytest
from helpers.refusals import refused
from submitit.core.utils import FailedJobError

from pipeline.chain import actions, launching, runner
from pipeline.cli import console
from pipeline.config.compose import plan
from pipeline.registry import summary
from stages.core.errors import CannotBeJudged, MissingRequirement, UserError

JOBLIB = ["kv=fp8,int8", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]


def test_a_launchers_job_repeats_the_users_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(*_: object) -> None:
        raise CannotBeJudged("FP16 itself answers none", ["copy"], ["tool_call"], ["copy-1: asked ..."])

    monkeypatch.setitem(actions.ACTIONS, "all", evaluate)
    planned = plan([f"workdir={tmp_path}", *JOBLIB], multirun=True)
    ended = launching.launch(planned, runner.JobRunner("20260101", planned.names, ("kv=fp8,int8", "model.path=/model")))
    assert [(end.code, end.message) for end in ended] == [(3, "FP16 itself answers none")] * 2
    assert summary.load(tmp_path, "20260101").exit_codes == {1: 3, 2: 3}
    for end in ended:
        assert end.step is not None
        assert end.step.wrong == ["copy-1: asked ..."]
        assert str(end.step.command).endswith("-m kv=fp8,int8 model.path=/model workloads.samples.copy=0")
    printed = capsys.readouterr()
    assert "job 2 of 2 int8: FP16 itself answers none" in printed.err
    assert "copy-1" not in printed.out, "the command prints wrong answers only at its end"
    console.close()


@pytest.mark.parametrize("error", [TypeError("cannot pickle"), PicklingError("of a task"), UserError("bad input")], ids=str)
def test_refusals_and_unpicklable_jobs_are_no_launcher_failure(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, launching.launcher_errors("joblib"):
        raise error
    assert caught.value is error


INTERRUPTED = """
import subprocess, sys
import psutil
from joblib.externals.loky.backend import resource_tracker
from pipeline.chain.launching import end_workers
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


class Ray:
    """A stand-in for the used part of Ray. Like the real one, it installs its own SIGTERM handler."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.fails, self.options = fails, dict[str, object]()

    def init(self, **options: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.fails is not None:
            raise self.fails
        self.options = options


RAYS = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", *launching.RAY_LINES, *launching.RAY_HERE)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    """A Ray stand-in and an environment without Ray's variables. Restores both and the SIGTERM handler afterwards."""
    for name in RAYS:
        monkeypatch.setenv(name, "")  # registers the variable so that it is restored
        monkeypatch.delenv(name)
    stand_in = Ray()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    before = signal.getsignal(signal.SIGTERM)
    yield stand_in
    signal.signal(signal.SIGTERM, before)


def test_the_commands_ray_listens_locally_behind_a_token(ray: Ray) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    launching.start_ray({"ray": {"init": {"address": None, "num_cpus": 2}}})
    assert "++hydra.launcher.ray.remote.max_retries=0" in launching.RAY_OVERRIDES, "a job that died is not run again"
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler, "Ray's would abort the command"
    assert ray.options["address"] == "local", "the command must not join another Ray instance on this machine"
    assert (ray.options["num_cpus"], ray.options["include_dashboard"]) == (2, False)
    assert "kvgate-ray-" in str(ray.options["_temp_dir"]), "the folder of Ray's logs and sockets is removed with the command"
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert (os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"])) == ("token", 64)


@pytest.mark.parametrize("place", ["key", "variable"])
def test_a_ray_cluster_keeps_its_own_settings(place: str, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "variable":
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    launching.start_ray({"ray": {"init": {"address": "10.0.0.1:6379" if place == "key" else None}}})
    assert set(ray.options) <= {"address", "logging_level"}, "Ray refuses other options for a cluster that it joins"
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", *launching.RAY_HERE} & set(os.environ)


def test_ray_start_failure_is_a_missing_requirement(ray: Ray) -> None:
    ray.fails = Exception("The current node timed out during startup. This could happen because\nmore")
    with refused(MissingRequirement, "hydra/launcher=ray: Ray did not start (Exception: The current node timed out during"):
        launching.start_ray({})


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
    with pytest.raises(MissingRequirement, match=message) as caught, launching.launcher_errors("slurm"):
        raise error from cause
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error
