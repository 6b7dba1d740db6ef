"""The command line as a user meets it: one line an error, exit 2, quickly, and nothing written."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input.case import Case, Commands, Outcome


@pytest.fixture
def run(commands: Commands, tmp_path: Path) -> Callable[[list[str]], Outcome]:
    """Run a command line in a fork, in the test's directory."""
    return lambda arguments: commands.run(Case("", tuple(arguments), (), begins=True), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["stage=bild"], "stage=bild: no such option, did you mean build?"),
        (["kv=fp9"], "kv=fp9: no such option, did you mean fp8?"),
        (["kv.grp=3"], "kv.grp: unknown key"),
        (["kv.value.group=32"], "kv.value.group: unknown key, did you mean group_size?"),
        (["kv=fp8k_int4v", "kv.value.group_size=33"], "kv.value.group_size must be 16, 32, 64 or 128, got 33"),
        (["kv.sink_tokens=-1"], "kv.sink_tokens: input should be greater than or equal to 0 (got -1)"),
        (["gates.max_mean_kl=nan"], "gates.max_mean_kl: input should be a finite number (got nan)"),
        (["seed=abc"], "seed: input should be a valid integer (got 'abc')"),
        (["model.path=/nowhere"], "model.path=/nowhere"),
        (["kv=fp8,int8"], "kv=fp8,int8: several values need a sweep; add -m"),
        (["-m", "kv=fp8,fp9"], "kv=fp9: no such option, did you mean fp8?"),
        (["--frobnicate"], "--frobnicate"),
        (["kv=fp8", "backend=tensorflow"], "backend=tensorflow: no such option"),
        (["backend=torch", "+backend.attention=graph"], "backend.attention: unknown key"),
        (["backend=torch", "backend.device=gpu"], "backend.device=gpu: no such option, did you mean cpu?"),
        (["backend.name=onxruntime"], "backend.name=onxruntime: no such option, did you mean onnxruntime?"),
        (["backend=torch", "backend.treads=2"], "backend.treads: unknown key, did you mean threads?"),
        (["+gates.margins.retreival=0.02"], "gates.margins.retreival=0.02: retreival has no answers to judge"),
        (["--config-dir", "nowhere", "kv=mine"], "--config-dir=nowhere: no such directory"),
        (["experiment=demi"], "experiment=demi: no such option, did you mean demo?"),
        (["--cfg", "job", "kv=fp9"], "kv=fp9: no such option, did you mean fp8?"),
        (["seed=0", "-m", "kv=fp8,fp9"], "kv=fp9: no such option, did you mean fp8?"),
        (["workloads.jsonl='~/nowhere.jsonl'"], "nowhere.jsonl: no such file"),
        (["stage=verify"], "bundle: missing; stage=verify needs the directory of an engine"),
        (["stage=build", "bundle=engine"], "bundle=engine: only stage=verify reads it"),
        (["stage=verify", "bundle=/nowhere"], "bundle=/nowhere: no such directory"),
        (["stage=verify", "bundle=."], "bundle=.: holds neither identity.json nor bundle.json"),
        (["stage=tune", "tune.policies=[fp16,fp9]"], "tune.policies=fp9: no such policy in conf/kv, did you mean fp8?"),
        (["stage=tune", "tune.policies=[fp16,int4_sinks]"], "tune.policies=int4_sinks: keeps some tokens or layers"),
        (["stage=tune", "tune.max_kl=0"], "tune.max_kl: input should be greater than 0"),
        (["stage=tune", "tune.modelopt=/nowhere"], "tune.modelopt=/nowhere: cannot be read as JSON"),
        (["tracking.uri=postgresql://me:hunter2@host/db"], "tracking.uri must not hold a password"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_line_that_names_key_value_and_fix(
    arguments: list[str], expected: str, run: Callable[[list[str]], Outcome], tmp_path: Path
) -> None:
    result = run(arguments)
    assert result.code == 2, result.stderr
    assert expected in result.stderr
    assert result.stderr.startswith("pipeline: error: ")
    assert result.stderr.count("pipeline: error: ") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_problem_is_named_at_once(run: Callable[[list[str]], Outcome]) -> None:
    result = run(["seed=-1", "backend.threads=0"])
    assert result.code == 2
    assert "backend.threads" in result.stderr
    assert "seed" in result.stderr


def test_version_is_printed(run: Callable[[list[str]], Outcome]) -> None:
    assert run(["--version"]).stdout.startswith("kvgate ")


def test_the_composed_configuration_can_be_shown(run: Callable[[list[str]], Outcome]) -> None:
    result = run(["--cfg", "job", "kv=int8"])
    assert result.code == 0
    assert "dtype: int8" in result.stdout


def test_a_password_in_an_override_is_not_repeated(run: Callable[[list[str]], Outcome]) -> None:
    result = run(["tracking.uri=postgresql://me:hunter2@host/db", "kv=fp9"])
    assert "hunter2" not in result.stderr + result.stdout


def test_a_workdir_that_is_a_file_is_refused(run: Callable[[list[str]], Outcome], tmp_path: Path) -> None:
    (tmp_path / "work").write_text("")
    for stage in ("build", "promote", "status"):
        result = run([f"stage={stage}"])
        assert (result.code, result.stderr.count("pipeline: error: ")) == (2, 1)
        assert "workdir=work: is not a directory" in result.stderr


def test_a_status_before_any_run_says_so_and_makes_nothing(run: Callable[[list[str]], Outcome], tmp_path: Path) -> None:
    result = run(["stage=status", "workdir=here"])
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith("here: nothing was built or judged here yet\n")
    assert "python -m pipeline workdir=here stage=all kv=fp8" in result.stdout
    as_json = run(["stage=status", "--json", "workdir=here", "tracking=none"])
    assert (as_json.code, as_json.stderr) == (0, "")
    assert json.loads(as_json.stdout)["kinds"] == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_named_conf_where_the_user_stands_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    command = [sys.executable, "-m", "pipeline", "--cfg", "job", "kv=int8"]
    assert "dtype: int8" in subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout


def test_a_policy_of_the_users_own_is_found_in_config_dir(run: Callable[[list[str]], Outcome], tmp_path: Path) -> None:
    policy = (Path(__file__).parents[2] / "conf" / "kv" / "int8.yaml").read_text().replace("name: int8", "name: mine")
    (tmp_path / "own" / "kv").mkdir(parents=True)
    (tmp_path / "own" / "kv" / "mine.yaml").write_text(policy)
    result = run(["--config-dir", "own", "--cfg", "job", "kv=mine"])
    assert "name: mine" in result.stdout, result.stderr


def test_a_sweep_may_name_its_policies_by_a_pattern(run: Callable[[list[str]], Outcome]) -> None:
    result = run(["-m", "kv=glob(int*)", "model.path=/nowhere"])
    assert "model.path=/nowhere" in result.stderr


def test_promote_without_candidates_says_what_to_run_and_writes_only_its_summary(
    run: Callable[[list[str]], Outcome], tmp_path: Path
) -> None:
    result = run(["stage=promote"])
    assert (result.code, result.stderr.count("pipeline: error: ")) == (2, 1)
    assert "run stage=evaluate first" in result.stderr
    assert {path.name for path in (tmp_path / "work").iterdir()} <= {"summary.json", "summaries", ".summary.json.lock"}
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


def test_sigterm_is_a_control_c(tmp_path: Path) -> None:
    stopped = (
        "import os, signal; import pipeline.__main__ as command; "
        "command._dispatch = lambda _: os.kill(os.getpid(), signal.SIGTERM); raise SystemExit(command.main())"
    )
    process = subprocess.run([sys.executable, "-c", stopped], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 130
    assert process.stderr == "pipeline: interrupted; what was finished is kept, run it again to go on\n"
