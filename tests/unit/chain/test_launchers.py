"""Launchers of sweeps: their keys and refusals, advice and exceptions of jobs, Ray's start, and ended workers."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from pickle import PicklingError
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.refusals import refused
from hydra import compose
from submitit.core.utils import FailedJobError, UncompletedJobError

from pipeline.chain import command, launchers, stage_functions
from pipeline.cli import console
from pipeline.cli.next_steps import stage_command
from pipeline.config import overrides
from pipeline.config.compose import initialized, plan
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


SLURM = [
    "hydra/launcher=submitit_slurm",
    "hydra.launcher.partition=a100",
    "hydra.launcher.gpus_per_node=1",
    "hydra.launcher.timeout_min=120",
    "hydra.launcher.array_parallelism=64",
    "hydra.launcher.constraint='[rack1|rack2]'",
]


def test_jobs_are_named_in_the_order_of_the_command_line() -> None:
    planned = plan(["kv=fp8,int8", "kv.sink_tokens=4", "seed=1,0", "backend.threads=1"], multirun=True)
    assert planned.launcher == "basic"
    assert planned.names == (
        "fp8 kv.sink_tokens=4 seed=1",
        "fp8 kv.sink_tokens=4 seed=0",
        "int8 kv.sink_tokens=4 seed=1",
        "int8 kv.sink_tokens=4 seed=0",
    )
    assert [(job.kv.name, job.seed) for job in planned.jobs] == [("fp8", 1), ("fp8", 0), ("int8", 1), ("int8", 0)]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["kv=mine,yours"], "jobs 1 and 2: both have the display name foo; leave one out, or give each policy a name"),
        (["kv=fp8,'fp8'"], "jobs 1 and 2: both have the display name fp8"),
        (["kv=fp8,int8", "kv.name=it"], "jobs 1 and 2: both have the display name it kv.name=it"),
        (["kv=fp8,int8", "kv.name=x,y"], "jobs 1 and 3: both have the display name x kv.name=x"),
    ],
)
def test_candidates_of_equal_display_names_are_refused_before_any_work(
    overrides: list[str], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "kv").mkdir()
    for option, form in (("mine", "fp8"), ("yours", "int8")):
        (tmp_path / "kv" / f"{option}.yaml").write_text(f"defaults: [{form}, _self_]\nname: foo\n")
    with pytest.raises(UserError, match=f"^{problem}"):
        plan(overrides, multirun=True, folders=[tmp_path])


def test_aliases_are_refused_in_every_file_that_options_can_include(tmp_path: Path) -> None:
    (tmp_path / "kv" / "sub").mkdir(parents=True)
    (tmp_path / "kv" / "c.yaml").write_text("defaults: [fp8, sub/x@_here_, _self_]\nname: c\n")
    (tmp_path / "kv" / "sub" / "x.yaml").write_text("sink_tokens: &a 4\nrecent_tokens: *a\n")
    with pytest.raises(UserError, match=r"x\.yaml: uses a YAML alias \(\*name\); write the value out"):
        plan(["kv=c"], multirun=False, folders=[tmp_path])
    (tmp_path / "kv" / "sub" / "x.yaml").write_text("sink_tokens: 4\n")
    assert plan(["kv=c"], multirun=False, folders=[tmp_path]).jobs[0].kv.sink_tokens == 4


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


def test_the_last_value_of_a_key_counts_as_it_does_for_hydra() -> None:
    assert plan(["kv=fp8,int8", "seed=1", "kv=int4"], multirun=True).names == ("int4",)
    assert plan(["experiment=demo", "kv=fp8"], multirun=False).names == ("fp8",)


def test_an_experiments_sweep_stays_among_several_experiments() -> None:
    with pytest.raises(UserError, match=r"^experiment=demo: is a sweep itself; give it alone$"):
        plan(["experiment=quick,demo"], multirun=True)
    assert len(plan(["experiment=quick", "kv=fp8,int8"], multirun=True).jobs) == 2


def test_a_launcher_gets_its_resources_and_every_key() -> None:
    for arguments in (["hydra/launcher=joblib", "hydra.launcher.n_jobs=-1"], ["hydra/launcher=submitit_local"]):
        planned = plan(["kv=fp8,int8", *arguments], multirun=True)
        assert (f"hydra/launcher={planned.launcher}", planned.names) == (arguments[0], ("fp8", "int8"))
    more = ["hydra.launcher.qos=high", "hydra.launcher.tasks_per_node=2", "+hydra.launcher.additional_parameters.nice=5"]
    planned = plan(["kv=fp8,int8", *SLURM, *more, "hydra.launcher.setup=[module load cuda]"], multirun=True)
    with initialized():
        hydras = [line for line in planned.launcher_overrides if "hydra" in line]
        launcher = compose("config", hydras, return_hydra_config=True).hydra.launcher
    passed = {key: launcher[key] for key in ("partition", "qos", "tasks_per_node", "additional_parameters")}
    assert passed == {"partition": "a100", "qos": "high", "tasks_per_node": 2, "additional_parameters": {"nice": 5}}


SLURM_LAUNCHER = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
REFUSED: dict[str, tuple[list[str], str]] = {
    "one of another name": (["hydra/launcher=rq"], "no such launcher; choose one of basic, joblib"),
    "two": (["hydra/launcher=basic,joblib"], "kvgate sets hydra.*"),
    "none": (["~hydra/launcher"], "kvgate sets hydra.*"),
    "in another place": (["hydra/launcher@kv=joblib"], "kvgate sets hydra.*"),
    "code": ([*SLURM, "+hydra.launcher.additional_parameters._target_=os.system"], "kvgate sets hydra.*"),
    "a key of another": (
        ["hydra/launcher=joblib", "hydra.launcher.partition=a"],
        "not in 'JobLibLauncherConf'; choose the launcher",
    ),
    "no launcher": (["hydra.launcher.n_jobs=2"], "choose the launcher with hydra/launcher=NAME"),
    "words for a number": (["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=long"], "timeout_min: Value 'long'"),
    "several values": (["hydra/launcher=joblib", "hydra.launcher.n_jobs=1,2"], "hydra.launcher.n_jobs=1,2: kvgate sets"),
    "the whole node": (["hydra.launcher={_target_: os.system}"], "hydra.launcher={_target_: os.system}: kvgate sets hydra.*"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_launcher_or_one_that_names_code_is_refused(name: str) -> None:
    launcher_arguments, message = REFUSED[name]
    with refused(UserError, "", message):
        plan(["kv=fp8,int8", *launcher_arguments], multirun=True)


@pytest.mark.parametrize("stages", ["promote", "evaluate,rollback", "recommend"])
def test_no_job_of_a_sweep_promotes_or_plans(stages: str) -> None:
    with pytest.raises(UserError, match="cannot be a job of a sweep; leave out -m"):
        plan(["kv=fp8,int8", f"stage={stages}"], multirun=True)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Hydra warns about a file with the name of a schema
@pytest.mark.parametrize(
    ("file", "text", "key"),
    [
        ("hydra/launcher/joblib.yaml", "_target_: os.system", "launcher._target_"),
        ("hydra/launcher/submitit_slurm.yaml", f"_target_: {SLURM_LAUNCHER}\nsetup: [reboot]", "launcher.setup"),
        ("experiment/mine.yaml", "launcher: {_target_: hydra_plugins.mine.Launcher}", "launcher._target_"),
        ("experiment/mine.yaml", "sweeper: {_target_: hydra_plugins.mine.Sweeper}", "sweeper._target_"),
        ("experiment/mine.yaml", "job: {env_set: {LD_PRELOAD: evil.so}}", "job.env_set"),
    ],
)
def test_files_of_config_dir_bring_no_code_into_hydra(file: str, text: str, key: str, tmp_path: Path) -> None:
    for name in ("kv/other.yaml", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("name: other")
    group, option = str(Path(file).parent), Path(file).stem
    (tmp_path / file).write_text(text if group != "experiment" else f"# @package _global_\nhydra: {{{text}}}\n")
    with refused(UserError, f"hydra.{key}", "is set by a file, and could name code"):
        plan([f"{group}={option}", "kv=fp8,int8"], multirun=True, folders=[tmp_path])


@pytest.mark.parametrize(("name", "library"), [("joblib", "joblib"), ("submitit_slurm", "submitit"), ("ray", "ray")])
def test_a_missing_launcher_is_named_with_its_package(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "find_spec", lambda module: None if module == library else object())
    with refused(MissingRequirement, f"hydra/launcher={name}: not installed; pip install -e '.[{library}]'"):
        plan(["kv=fp8,int8", f"hydra/launcher={name}"], multirun=True)


PATHS = [
    "/data/modèle", "模型/7b", "/data/a=b", "/data/#1", "/data/[7b]", "[7b]/model", "{a}/b", "/data/(1)", "/data/it's",
    "/data/\"x\" and 'y'", "~/modèle; rm?&*!", "/data/ü ", "/data/back\\slash\\", "/data/$x%20",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_paths_arrive_in_jobs_and_next_commands_as_typed(path: str) -> None:
    keys = ("model.path", "workdir", "calibration.jsonl", "workloads.jsonl", "promote.name")
    (job,) = plan([f"{key}={path}" for key in keys] + ["stage=promote"], multirun=False).jobs
    assert [attrgetter(key)(job) for key in keys] == [path] * len(keys)
    planned = plan([f"workdir={path}", "kv=fp8,int8"], multirun=True)
    assert [job.workdir for job in planned.jobs] == [path, path]
    printed = shlex.split(stage_command(planned.jobs[0], "status"))
    assert plan(printed[printed.index("pipeline") + 1 :], multirun=False).jobs[0].workdir == path


def test_quoted_paths_and_paths_with_variables_stay_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVGATE_DATA", str(tmp_path))
    for typed, path in (("'/a,b'", "/a,b"), ('"/é"', "/é"), ("/a\\,b", "/a,b"), ("${oc.env:KVGATE_DATA}/é", f"{tmp_path}/é")):
        assert plan([f"workdir={typed}"], multirun=False).jobs[0].workdir == path


def test_a_job_that_the_cluster_ends_may_continue() -> None:
    error = UncompletedJobError("Job not requeued because: timed-out too many times.")
    assert exit_code(error) == 4
    assert re.fullmatch(
        r"the cluster ended this job \(.*too many times.\); raise hydra.launcher.timeout_min, .*", describe(error)
    )
