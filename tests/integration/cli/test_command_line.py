"""The command line as users see it: its output, the files it finds, and the files it writes. Refusals: tests/bad_input."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input.case import Case, Commands, Outcome


@pytest.fixture
def run(commands: Commands, tmp_path: Path) -> Callable[[list[str]], Outcome]:
    """A function that runs a command line in a fork, in the test's directory."""
    return lambda arguments: commands.run(Case("", tuple(arguments), (), begins=True), tmp_path)


def test_a_status_before_any_run_says_so_and_makes_nothing(run: Callable[[list[str]], Outcome], tmp_path: Path) -> None:
    result = run(["stage=status", "workdir=here"])
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith("here: nothing was built or judged here yet\n")
    assert "python -m pipeline workdir=here stage=all kv=fp8" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_folder_named_conf_where_the_user_stands_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    command = [sys.executable, "-m", "pipeline", "--cfg", "job", "kv=int8"]
    assert "dtype: int8" in subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout


def test_a_policy_of_the_users_own_is_found_in_config_dir(run: Callable[[list[str]], Outcome], tmp_path: Path) -> None:
    policy = (Path(__file__).parents[3] / "conf" / "kv" / "int8.yaml").read_text().replace("name: int8", "name: mine")
    (tmp_path / "own" / "kv").mkdir(parents=True)
    (tmp_path / "own" / "kv" / "mine.yaml").write_text(policy)
    result = run(["--config-dir", "own", "--cfg", "job", "kv=mine"])
    assert "name: mine" in result.stdout, result.stderr


def test_a_sweep_may_name_its_policies_by_a_pattern(run: Callable[[list[str]], Outcome]) -> None:
    result = run(["-m", "kv=glob(int*)", "model.path=/nowhere"])
    assert "model.path=/nowhere" in result.stderr


def test_sigterm_is_a_control_c(tmp_path: Path) -> None:
    stopped = (
        "import os, signal; import pipeline.__main__ as command; "
        "command._planned = lambda _: os.kill(os.getpid(), signal.SIGTERM); raise SystemExit(command.main())"
    )
    process = subprocess.run([sys.executable, "-c", stopped], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 130
    assert process.stderr == "pipeline: error: interrupted; finished work is kept; run it again to continue\n"


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_do_not_spin_while_they_wait_unless_the_user_wants_that(given: dict[str, str], policy: str) -> None:
    script = "import os, pipeline.__main__ as command; command.main(); print(os.environ['OMP_WAIT_POLICY'])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    printed = subprocess.run(
        [sys.executable, "-c", script, "--version"], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split()[-1] == policy
