"""Composition of a command line: names of jobs, sweeps, launchers, own options, and the locale."""

import shlex
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from helpers.refusals import refused
from hydra import compose

from pipeline.cli.next_steps import stage_command
from pipeline.config import overrides
from pipeline.config.compose import initialized, plan
from stages.core.errors import MissingRequirement, UserError


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


SLURM = [
    "hydra/launcher=submitit_slurm",
    "hydra.launcher.partition=a100",
    "hydra.launcher.gpus_per_node=1",
    "hydra.launcher.timeout_min=120",
    "hydra.launcher.array_parallelism=64",
    "hydra.launcher.constraint='[rack1|rack2]'",
]


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


BYTES = "mod\udcc3\udca8le"
"""`modèle` as Python decodes it in such a locale."""


@pytest.mark.parametrize(
    ("arguments", "folders", "folder", "named"),
    [
        ([f"model.path={BYTES}"], [], "", "model.path"),
        (["model.path=modèle"], [], "", "model.path"),
        ([f"tracking.uri=sqlite:////{BYTES}.db"], [], "", "tracking.uri"),
        ([], [BYTES], "", "mod??le: "),
        (["kv=int8"], [], "modèle", "current directory="),
    ],
)
def test_only_characters_outside_ascii_are_refused(
    arguments: list[str], folders: list[str], folder: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert plan(["kv=int8"], multirun=False).jobs[0].kv.name == "int8"
    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / folder)
    with refused(UserError, named, "holds characters outside ASCII, but this locale's encoding is ascii; set LC_ALL=C.UTF-8"):
        plan(arguments, multirun=False, folders=folders)
