"""Sweep launchers: supported launchers, forwarded keys, and refusals; paths with any characters."""

import doctest
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pickle import PicklingError

import pytest
from joblib.externals.loky.process_executor import TerminatedWorkerError
from refusals import refused
from submitit.core.utils import FailedJobError, UncompletedJobError

from pipeline.chain import launching, runner
from pipeline.cli import console, next_steps
from pipeline.cli.next_steps import standing
from pipeline.config import compose, launchers
from pipeline.config.compose import plan
from pipeline.registry.summary import Summary, load
from stages.core.errors import CannotBeJudged, MissingRequirement, UserError, describe, exit_code

SLURM = [
    "hydra/launcher=submitit_slurm",
    "hydra.launcher.partition=a100",
    "hydra.launcher.gpus_per_node=1",
    "hydra.launcher.timeout_min=120",
    "hydra.launcher.array_parallelism=64",
    "hydra.launcher.constraint='[rack1|rack2]'",
]


def test_the_jobs_of_a_sweep_are_named_in_the_order_of_the_command_line() -> None:
    planned = plan(["kv=fp8,int8", "kv.sink_tokens=4", "seed=1,0", "backend.threads=1"], multirun=True)
    assert planned.launcher == "basic"
    assert planned.names == (
        "fp8 kv.sink_tokens=4 seed=1",
        "fp8 kv.sink_tokens=4 seed=0",
        "int8 kv.sink_tokens=4 seed=1",
        "int8 kv.sink_tokens=4 seed=0",
    )
    assert [(job.kv.name, job.seed) for job in planned.jobs] == [("fp8", 1), ("fp8", 0), ("int8", 1), ("int8", 0)]


def test_a_launcher_that_refuses_its_keys_leaves_the_last_sweep_and_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("summary.json", "report.html", "summaries/20260101.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(Summary(sweep="20260101").model_dump_json())
    given = ["kv=fp8,int8", f"workdir={tmp_path}", "hydra/launcher=joblib", "hydra.launcher.n_jobs=0"]
    assert runner.run(plan(given, multirun=True), "20260102") == 2
    assert "n_jobs == 0 in Parallel has no meaning; correct hydra.launcher.*\n" in capsys.readouterr().err
    assert {path.name for path in tmp_path.rglob("*.*")} >= {"summary.json", "report.html", "20260101.json"}
    assert load(tmp_path).sweep == "20260101"
    assert not (tmp_path / "summaries" / "20260102.json").exists()


def test_what_a_job_of_a_launcher_advises_repeats_what_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(*_: object) -> None:
        raise CannotBeJudged("FP16 itself answers none", ["copy"], ["tool_call"], ["copy-1: asked ..."])

    monkeypatch.setattr(next_steps, "_given", [])  # as in a launcher's process
    monkeypatch.setitem(runner.STAGES, "all", evaluate)
    planned = plan([f"workdir={tmp_path}", "kv=fp8,int8", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"], multirun=True)
    ended = launching.launch(planned, runner.Task("a sweep", planned.names, ("kv=fp8,int8", "model.path=/model")))
    assert ended == [(3, "FP16 itself answers none")] * 2
    said = capsys.readouterr().out
    assert said.count("copy-1: asked ...") == said.count("-m kv=fp8,int8 model.path=/model workloads.samples.copy=0") == 1
    console.close()


def test_all_typos_of_a_command_are_reported_at_once() -> None:
    with pytest.raises(UserError) as told:
        plan(["kv=fp9", "modle.path=/m", "gates.margn=0.1", "backend=onnxruntim", "backend.threds=1", "seed=1"], multirun=False)
    lines = str(told.value).splitlines()
    assert [line.split(":")[0] for line in sorted(lines)] == [
        "backend.threds",
        "backend=onnxruntim",
        "gates.margn",
        "kv=fp9",
        "modle",
    ]


def test_the_last_value_of_a_key_counts_as_it_does_for_hydra() -> None:
    assert plan(["kv=fp8,int8", "seed=1", "kv=int4"], multirun=True).names == ("int4",)
    assert plan(["experiment=demo", "kv=fp8"], multirun=False).names == ("fp8",)


@pytest.mark.parametrize(
    ("launcher", "asked"),
    [
        ("joblib", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
        ("joblib", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=-1"]),
        ("submitit_local", ["hydra/launcher=submitit_local", "hydra.launcher.gpus_per_node=1"]),
        ("submitit_slurm", SLURM),
    ],
)
def test_a_launcher_may_be_asked_for_with_its_resources(launcher: str, asked: list[str]) -> None:
    planned = plan(["kv=fp8,int8", *asked], multirun=True)
    assert (planned.launcher, planned.names) == (launcher, ("fp8", "int8"))


def test_any_key_that_is_typed_is_passed_on_to_the_launcher() -> None:
    more = ["hydra.launcher.qos=high", "hydra.launcher.tasks_per_node=2", "+hydra.launcher.additional_parameters.nice=5"]
    planned = plan(["kv=fp8,int8", *SLURM, *more, "hydra.launcher.setup=[module load cuda]"], multirun=True)
    passed = {key: planned.launcher_config[key] for key in ("partition", "qos", "tasks_per_node", "additional_parameters")}
    assert passed == {"partition": "a100", "qos": "high", "tasks_per_node": 2, "additional_parameters": {"nice": 5}}


REFUSED: dict[str, tuple[list[str], str]] = {
    "one of another name": (["hydra/launcher=rq"], "no such launcher; choose one of basic, joblib"),
    "two": (["hydra/launcher=basic,joblib"], "kvgate sets hydra.*"),
    "none": (["~hydra/launcher"], "kvgate sets hydra.*"),
    "in another place": (["hydra/launcher@kv=joblib"], "kvgate sets hydra.*"),
    "code": (["hydra/launcher=joblib", "hydra.launcher._target_=os.system"], "kvgate sets hydra.*"),
    "code below": ([*SLURM, "+hydra.launcher.additional_parameters._target_=os.system"], "names code"),
    "a key of another": (["hydra/launcher=joblib", "hydra.launcher.partition=a"], "the launcher has no such key"),
    "no launcher": (["hydra.launcher.n_jobs=2"], "the launcher has no such key; choose hydra/launcher=NAME"),
    "words for a number": (["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=long"], "timeout_min: Value 'long'"),
    "several values": (["hydra/launcher=joblib", "hydra.launcher.n_jobs=1,2"], "hydra.launcher.n_jobs=1,2: kvgate sets"),
    "the whole node": (["hydra.launcher={_target_: os.system}"], "hydra.launcher={_target_: os.system}: kvgate sets hydra.*"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_launcher_or_one_that_names_code_is_refused(name: str) -> None:
    asked, said = REFUSED[name]
    with refused(UserError, "", said):
        plan(["kv=fp8,int8", *asked], multirun=True)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("stage=promote", "works on the whole work directory.*leave -m out"),
        ("stage=evaluate,rollback", "works on the whole work directory.*leave -m out"),
        ("stage=capacity", "looks at every policy in one run"),
        ("stage=recommend", "looks at every policy in one run"),
    ],
)
def test_no_job_of_a_sweep_moves_what_serves_or_plans(asked: str, why: str) -> None:
    alone = asked.replace("=", ",").split(",")[-1]
    with pytest.raises(UserError, match=f"stage={alone}: {why}"):
        plan(["kv=fp8,int8", asked], multirun=True)
    assert plan(["kv=fp8,int8", "stage=all"], multirun=True).sweeping


@pytest.mark.filterwarnings("ignore::UserWarning")  # Hydra warns about a file with the name of a schema
@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("hydra/launcher/joblib.yaml", "_target_: os.system\n", "hydra.launcher._target_=os.system: is no launcher"),
        (
            "hydra/launcher/submitit_slurm.yaml",
            "_target_: hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher\nsetup: [reboot]\n",
            "hydra.launcher.setup: is set by a file, and could name a command",
        ),
        (
            "experiment/mine.yaml",
            "launcher: {_target_: hydra_plugins.mine.Launcher}",
            "hydra_plugins.mine.Launcher: is no launcher",
        ),
        ("experiment/mine.yaml", "sweeper: {_target_: hydra_plugins.mine.Sweeper}", "a job ends with a verdict"),
    ],
)
def test_files_of_config_dir_bring_no_code_in_a_launchers_place(file: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    group, option = str(Path(file).parent), Path(file).stem
    (tmp_path / file).write_text(text if group != "experiment" else f"# @package _global_\nhydra: {{{text}}}\n")
    with refused(UserError, "", said):
        plan([f"{group}={option}", "kv=fp8,int8"], multirun=True, folders=[tmp_path])


@pytest.mark.parametrize(("name", "library"), [("joblib", "joblib"), ("submitit_slurm", "submitit"), ("ray", "ray")])
def test_a_launcher_that_is_not_installed_is_named_with_its_package(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "find_spec", lambda asked: None if asked == library else object())
    with refused(MissingRequirement, f"hydra/launcher={name}: not installed; pip install 'kvgate[{library}]'"):
        plan(["kv=fp8,int8", f"hydra/launcher={name}"], multirun=True)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            TerminatedWorkerError("long text\nThe exit codes of the workers are {SIGKILL(-9)}"),
            4,
            "died, or .* workers are {SIGKILL",
        ),
        (
            FailedJobError("Traceback\n  File\nOSError: no such directory\n"),
            4,
            r"failed \(OSError: no such directory\); free some",
        ),
        (FailedJobError("sbatch: error: invalid partition specified: nope"), 4, "sbatch: error: invalid partition"),
        (RuntimeError('Could not detect "srun", are you indeed on a slurm cluster?'), 4, 'Could not detect "srun"'),
        (
            ValueError("n_jobs == 0 has no meaning"),
            2,
            "^hydra/launcher=joblib: n_jobs == 0 has no meaning; correct hydra.launcher",
        ),
    ],
)
def test_a_launchers_exception_becomes_a_refusal_in_one_line(error: Exception, code: int, said: str) -> None:
    with pytest.raises((UserError, MissingRequirement), match=said) as caught, launching.launcher_errors("joblib"):
        raise error
    assert exit_code(caught.value) == code
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_the_whole_output_of_sbatch_is_shown() -> None:
    with (
        refused(MissingRequirement, "", "invalid partition: nope sbatch: error: submission failed"),
        launching.launcher_errors("x"),
    ):
        said = "sbatch: error: invalid partition: nope\nsbatch: error: submission failed\n"
        raise FailedJobError(said) from subprocess.CalledProcessError(1, ["sbatch"], stderr=said)


@pytest.mark.parametrize("error", [TypeError("cannot pickle"), PicklingError("of a task"), UserError("bad input")], ids=str)
def test_a_refusal_or_a_job_that_cannot_be_pickled_is_no_failure_of_the_launcher(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, launching.launcher_errors("joblib"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", [ValueError("ours"), TypeError("ours"), RuntimeError("ours")], ids=repr)
def test_an_exception_of_a_job_is_passed_on_unchanged(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def task(_: object) -> None:
        raise error

    monkeypatch.setattr(launching, "end_workers", lambda: None)  # it would end other processes of the tests
    planned = plan(["kv=fp8,int8", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"], multirun=True)
    with pytest.raises(type(error), match=r"^ours$"):
        launching.launch(planned, task)


def test_a_job_that_the_cluster_ends_may_continue() -> None:
    error = UncompletedJobError("Job not requeued because: timed-out too many times.")
    assert exit_code(error) == 4
    assert re.fullmatch(
        r"the cluster ended this job \(.*too many times.\); raise hydra.launcher.timeout_min, .*", describe(error)
    )


INTERRUPTED = """
import subprocess, sys
import psutil
from joblib.externals.loky.backend import resource_tracker
from pipeline.chain.launching import end_workers
resource_tracker.ensure_running()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
end_workers()
print([" ".join(child.cmdline()).count("resource_tracker") for child in psutil.Process().children()])
"""


def test_resource_trackers_that_clean_up_after_workers_are_not_killed() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], check=True, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[1]\n", "the worker ended, the tracker did not"


class Ray:
    """A stand-in for the used part of Ray. Like the real one, it installs its own SIGTERM handler."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.fails, self.options = fails, dict[str, object]()

    def init(self, **options: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.fails is not None:
            raise self.fails
        self.options = options

    def is_initialized(self) -> bool:
        return bool(self.options)

    def shutdown(self) -> None:
        self.options = {}


RAYS = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", *launching.RAY_LINES, *launching.RAY_HERE)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    """A Ray stand-in and an environment without Ray's variables. Restores both and the SIGTERM handler afterwards."""
    for name in RAYS:
        monkeypatch.setenv(name, "")  # registers the variable so that it is restored
        monkeypatch.delenv(name)
    stand_in = Ray()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.setattr(launching, "LAST_LINES_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    yield stand_in
    signal.signal(signal.SIGTERM, before)


def test_a_ray_of_the_command_listens_on_this_machine_alone_behind_a_token(ray: Ray) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    overrides = launching.start_ray({"ray": {"init": {"address": None, "num_cpus": 2}}})
    assert "++hydra.launcher.ray.remote.max_retries=0" in overrides, "a job that died is not run again"
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler, "Ray's would abort the command"
    assert ray.options["address"] == "local", "it joins no other Ray that runs here"
    assert (ray.options["num_cpus"], ray.options["include_dashboard"]) == (2, False)
    assert "kvgate-ray-" in str(ray.options["_temp_dir"]), "its logs and sockets go with the command"
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert (os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"])) == ("token", 64)


@pytest.mark.parametrize("place", ["key", "variable"])
def test_a_ray_cluster_keeps_its_own_settings(place: str, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "variable":
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    launching.start_ray({"ray": {"init": {"address": "10.0.0.1:6379" if place == "key" else None}}})
    assert set(ray.options) <= {"address", "logging_level"}, "Ray refuses others of a cluster"
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", *launching.RAY_HERE} & set(os.environ)


def test_a_ray_that_does_not_start_is_the_machines_doing(ray: Ray) -> None:
    ray.fails = Exception("The current node timed out during startup. This could happen because\nmore")
    with refused(MissingRequirement, "hydra/launcher=ray: Ray did not start (Exception: The current node timed out during"):
        launching.start_ray({})


def test_the_examples_of_the_module_hold() -> None:
    assert doctest.testmod(compose).failed == 0


PATHS = [
    "/data/modèle",
    "模型/7b",
    "/data/a=b",
    "/data/#1",
    "/data/[7b]",
    "[7b]/model",
    "{a}/b",
    "/data/(1)",
    "/data/it's",
    "/data/\"x\" and 'y'",
    "~/modèle; rm?&*!",
    "/data/ü ",
    "/data/back\\slash\\",
    "/data/$x%20",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["model.path", "workdir", "calibration.jsonl", "workloads.jsonl", "promote.name"])
def test_a_path_arrives_as_it_is_typed(key: str, path: str) -> None:
    typed = [f"{key}={path}", *(["stage=promote"] if key == "promote.name" else [])]
    (job,) = plan(typed, multirun=False).jobs
    first, _, last = key.partition(".")
    assert (getattr(getattr(job, first), last) if last else getattr(job, first)) == path


@pytest.mark.parametrize("path", PATHS)
def test_jobs_of_a_sweep_and_next_commands_have_the_path(path: str) -> None:
    planned = plan([f"workdir={path}", "kv=fp8,int8"], multirun=True)
    assert [job.workdir for job in planned.jobs] == [path, path]
    printed = shlex.split(standing(planned.jobs[0], "status"))
    again = plan(printed[printed.index("pipeline") + 1 :], multirun=False)
    assert again.jobs[0].workdir == path


def test_a_quoted_path_and_one_with_a_variable_stay_what_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVGATE_DATA", str(tmp_path))
    for typed, path in (("'/a,b'", "/a,b"), ('"/é"', "/é"), ("/a\\,b", "/a,b"), ("${oc.env:KVGATE_DATA}/é", f"{tmp_path}/é")):
        assert plan([f"workdir={typed}"], multirun=False).jobs[0].workdir == path
