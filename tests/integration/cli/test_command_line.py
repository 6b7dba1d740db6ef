"""The command line as users see it: its output, capacities, recommendations, and files. Refusals: tests/bad_input."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input.forks import BadInput, CommandResult, RunCase
from helpers.checkpoints.configs import LLAMA_8B
from helpers.registry.judged_engine import config_of

from pipeline.chain.job import Run
from pipeline.chain.planning import recommend_policy, show_capacity
from stages.core.errors import GateRefusal


@pytest.fixture
def run(run_case: RunCase, tmp_path: Path) -> Callable[[list[str]], CommandResult]:
    """A function that runs a command line in a fork, in the test's directory."""
    return lambda arguments: run_case(BadInput("", tuple(arguments), (), runs_stage=True), tmp_path)


def test_a_status_before_any_run_says_so_and_makes_nothing(run: Callable[[list[str]], CommandResult], tmp_path: Path) -> None:
    result = run(["stage=status", "workdir=here"])
    assert (result.code, result.stderr, result.heavy) == (0, "", ()), "without a store it does not wait for MLflow"
    assert result.stdout == "here: nothing was built or judged here yet\n"
    assert list(tmp_path.iterdir()) == []


def test_a_policy_may_be_the_users_own_or_named_by_a_pattern(run: Callable[[list[str]], CommandResult], tmp_path: Path) -> None:
    (tmp_path / "own" / "kv").mkdir(parents=True)
    text = (CONF / "int8.yaml").read_text().replace("name: int8", "name: mine")
    (tmp_path / "own" / "kv" / "mine.yaml").write_text(text)
    result = run(["--config-dir", "own", "--cfg", "job", "kv=mine"])
    assert "name: mine" in result.stdout, result.stderr
    assert run(["--cfg", "job", "-m", "kv=glob(int8*)"]).stdout.count("\n# job ") == len([*CONF.glob("int8*.yaml")])


def test_sigterm_is_a_control_c(tmp_path: Path) -> None:
    stopped = (
        "import os, signal; import pipeline.__main__ as command; "
        "command._plan_command = lambda _: os.kill(os.getpid(), signal.SIGTERM); raise SystemExit(command.main())"
    )
    process = subprocess.run([sys.executable, "-c", stopped], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 130
    assert process.stderr == "pipeline: error: interrupted; finished work is kept; run it again to continue\n"


ROOT = Path(__file__).resolve().parents[3]
CONF = ROOT / "conf" / "kv"


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """Arguments for a model that consists only of a config.json."""
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return [f"model.path={folder}", f"workdir={tmp_path / 'work'}"]


def test_capacity_needs_only_a_config_json(overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = ["capacity.gpu_gib=45", "capacity.weights_gib=0", "capacity.reserve_gib=0"]
    show_capacity(Run(config_of(*overrides, "stage=capacity", "kv=fp8", "kv.sink_tokens=4", *bare)))
    output = capsys.readouterr().out
    policies = {entry["name"]: entry for entry in json.loads((tmp_path / "work" / "capacity.json").read_text())["policies"]}
    assert {path.stem for path in CONF.glob("*.yaml")} | {"fp8 kv.sink_tokens=4"} == policies.keys()
    unserved = {"llamacpp_q4_0", "llamacpp_q8_0", "llamacpp_q8k_q4v", "vllm_fp8", "vllm_int4", "vllm_int8"}
    # A narrow terminal breaks the name "fp8 kv.sink_tokens=4" into two lines.
    assert [name for name in policies if (f" {name.split()[-1]} " in output) == (name in unserved)] == []
    assert "left out: 6 that backend=onnxruntime does not serve\n" in output
    rows = re.findall(r"^ (\w+) .* ([\d,]+) +[\d,]+ (kept|forgotten) *$", output, re.MULTILINE)
    requests = [int(count) for _, count, tokens in rows if tokens == "kept"]
    assert requests == sorted(requests, reverse=True)
    forgetting = [name for name, _, tokens in rows if tokens == "forgotten"]
    assert forgetting == [name for name, *_ in rows[-4:]], "policies that evict come last"
    assert (policies["int4_g64"]["tokens_that_fit"], "1,387,821" in output) == (1_387_821, True)
    assert {path.name for path in (tmp_path / "llama-8b").iterdir()} == {"config.json"}


def test_a_budget_that_no_policy_meets_names_the_best_policy(overrides: list[str]) -> None:
    use = ["capacity.gpu_gib=17", "capacity.reserve_gib=0", "capacity.concurrency=500"]
    with pytest.raises(GateRefusal, match=r"capacity\.concurrency=500: no policy admits this many requests, .*int4_streaming "):
        show_capacity(Run(config_of(*overrides, "stage=capacity", *use)))


def test_without_evidence_nothing_is_recommended_or_written(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed command for the evidence repeats this command's options."""
    arguments = ["stage=recommend", "gates.max_mean_kl=0.02", "backend=vllm", "capacity.gpu_gib=80"]
    with pytest.raises(GateRefusal, match="no policy has evidence that covers this use: nothing is recommended"):
        recommend_policy(Run(config_of(*overrides, *arguments), arguments=arguments))
    output = capsys.readouterr().out
    assert "gates.max_mean_kl=0.02 backend=vllm backend.max_model_len=32768 backend.max_num_seqs=8 " in output
    assert "experiment=vllm 'workloads.lengths=[32768]' stage=evaluate kv=vllm_int8,fp8" in output
    assert not list(tmp_path.rglob("mlflow.db"))


FOREIGN = '"""Data pipelines."""\n\nraise RuntimeError("foreign code was run")\n'


def kvgate(*path: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the script with the given directories first on the import path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, str(ROOT / "pipeline" / "kvgate"), "--version"]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=cwd)


def test_the_script_is_the_command_line() -> None:
    result = kvgate(ROOT)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("kvgate ")


@pytest.mark.parametrize(
    ("planted", "stands_there"),
    [("pipeline/__init__.py", False), ("plugins/__init__.py", False), ("pipeline/__init__.py", True), ("pipeline.py", False)],
)
def test_a_package_that_shadows_ours_is_named_and_not_run(planted: str, stands_there: bool, tmp_path: Path) -> None:
    (tmp_path / planted).parent.mkdir(exist_ok=True)
    (tmp_path / planted).write_text(FOREIGN)
    result = kvgate(Path(), ROOT, cwd=tmp_path) if stands_there else kvgate(tmp_path, ROOT)
    place = tmp_path / planted.removesuffix("/__init__.py")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (4, "", 1)
    assert result.stderr.startswith(f"kvgate: error: {place} is not kvgate's, and shadows its own {place.stem}: ")
    assert f"take {tmp_path} out of PYTHONPATH, or uninstall what brought it" in result.stderr
