"""`kvgate <Tab>`: groups, options, keys, values and files, in a real bash as well."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hydra._internal.utils import get_args_parser

from pipeline.config import CONF
from pipeline.config.completion import BASH, INSTALL, OPTIONS, PYTHON, candidates, complete
from pipeline.config.compose import plan
from pipeline.config.config import Stage
from pipeline.core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
REFUSED = {"--config-name", "--config-path", "--run", "--experimental-rerun"}


def test_groups_and_keys_are_offered() -> None:
    offered = candidates("kvgate ")
    groups = {f"{path.name}=" for path in CONF.iterdir() if list(path.glob("*.yaml"))}
    assert groups <= set(offered)
    assert {"stage=", "seed=", "workdir=", "log=", "bundle=", "kv.", "gates.", "promote."} <= set(offered)


@pytest.mark.parametrize("group", sorted(path.name for path in CONF.iterdir() if list(path.glob("*.yaml"))))
def test_all_options_of_a_group_are_offered(group: str) -> None:
    assert candidates(f"kvgate {group}=") == sorted(f"{group}={path.stem}" for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvgate stage=", [f"stage={stage}" for stage in get_args(Stage)]),
        ("kvgate log=", ["log=human", "log=json", "log=quiet"]),
        ("kvgate stage=ev", ["stage=evaluate"]),
        ("kvgate -m kv=fp8,int8_", ["kv=fp8,int8_asym", "kv=fp8,int8_channel", "kv=fp8,int8_tensor"]),
        ("kvgate kv.sink", ["kv.sink_tokens="]),
        ("kvgate kv.value.gr", ["kv.value.granularity=", "kv.value.group_size="]),
        ("kvgate backend=torch backend.", ["backend.compute_dtype=", "backend.device=", "backend.name=", "backend.threads="]),
        ("kvgate backend.at", ["backend.attention="]),
        ("kvgate backend.attention=", ["backend.attention=auto", "backend.attention=graph", "backend.attention=native"]),
        ("kvgate promote.loosen_policy=", ["promote.loosen_policy=false", "promote.loosen_policy=true"]),
        ("kvgate kv.key.dtype=int", ["kv.key.dtype=int4", "kv.key.dtype=int8"]),
        ("kvgate quantize.device=c", ["quantize.device=cpu", "quantize.device=cuda"]),
        ("kvgate +kv.evic", ["+kv.eviction."]),
        ("kvgate --cf", ["--cfg"]),
        ("kvgate --cfg ", ["all", "hydra", "job"]),
        ("kvgate --cfg j", ["job"]),
        ("kvgate nonsense", []),
        ("kvgate no.such.key=", []),
        ("python -m pipeline kv=bf", ["kv=bf16"]),
    ],
)
def test_what_may_follow_is_offered(line: str, offered: list[str]) -> None:
    assert candidates(line) == sorted(offered)


def test_paths_are_offered_where_a_key_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "samples.jsonl").write_text("")
    assert candidates("kvgate model.path=m") == ["model.path=models/"]
    assert candidates("kvgate model.path=models/") == ["model.path=models/qwen/"]
    assert candidates("kvgate workloads.jsonl=") == ["workloads.jsonl=models/", "workloads.jsonl=samples.jsonl"]
    assert candidates("kvgate --config-dir ") == ["models/"]
    assert candidates("kvgate seed=") == []


def test_options_of_a_directory_of_ones_own_are_offered(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "mine.yaml").write_text("")
    assert candidates(f"kvgate --config-dir {tmp_path} kv=mi") == ["kv=mine"]
    assert candidates(f"kvgate --config-dir={tmp_path} kv=mi") == ["kv=mine"]


def test_every_option_of_the_command_line_is_offered_and_no_other() -> None:
    known = {name for action in get_args_parser()._actions for name in action.option_strings if name.startswith("--")}
    assert known - REFUSED == set(OPTIONS) - {"-m"}


@pytest.mark.parametrize("line", ["kvgate ", "kvgate kv.", "kvgate kv.value.", "kvgate tracking.", "kvgate workloads.load."])
def test_every_key_that_is_offered_is_one(line: str) -> None:
    planned = plan([], multirun=False).jobs[0]
    config = {**planned.model_dump(), "prune": planned.prune.model_dump()}
    for offered in candidates(line):
        node: object = config
        for part in offered.rstrip(".=").split("."):
            if offered.endswith("=") and part == "experiment":
                break
            assert isinstance(node, dict)
            assert part in node, offered
            node = node[part]


def test_what_is_no_request_is_refused_in_a_line() -> None:
    for arguments in ([], ["nope"], ["install=tcsh"], ["install=bash", "query=bash"]):
        with pytest.raises(UserError, match="give install=bash"):
            complete(arguments)


@pytest.mark.parametrize("shell", INSTALL)
def test_a_shell_is_told_how_to_begin_and_how_to_end(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("install", "uninstall"):
        assert complete([f"{action}={shell}"]) == 0
        assert "kvgate" in capsys.readouterr().out


def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has the command `kvgate`."""
    bin_ = tmp_path / "bin"
    bin_.mkdir(exist_ok=True)
    (bin_ / "kvgate").write_text(f'#!/bin/sh\nexec {sys.executable} -m pipeline.kvgate "$@"\n')
    (bin_ / "kvgate").chmod(0o755)
    return os.environ | {"PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def bash(script: str, line: str, tmp_path: Path) -> list[str]:
    """What bash offers for a command line, asked as it asks: through the function that `complete` names."""
    program = (
        f"{script}\n"
        'COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; name=${COMP_LINE%% *}\n'
        'spec=$(complete -p "$name"); function=${spec##*-F }; function=${function%% *}\n'
        "last=${COMP_LINE##* }; current=${last##*[=:]}\n"  # bash's own COMP_WORDBREAKS
        '"$function" "$2" "$current" ""\n'
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    command = sys.executable if line.startswith("python") else "kvgate"
    done = subprocess.run(
        ["bash", "-c", program, "bash", line, command],
        check=True,
        capture_output=True,
        text=True,
        env=installed(tmp_path),
        cwd=tmp_path,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(tmp_path: Path) -> None:
    assert bash(BASH, "kvgate stage=ev", tmp_path) == ["evaluate"], "bash has stage= already"
    assert bash(BASH, "kvgate kv.sink", tmp_path) == ["kv.sink_tokens="]
    assert bash(BASH + PYTHON, "python -m pipeline stage=ro", tmp_path) == ["rollback", "route"]
    assert bash(BASH + PYTHON, "python other.py stage=ro", tmp_path) == []


ZSH_ASKS = r"""
compdef() { function=$1 }
compadd() { print -rl -- "${@:5}" }
eval "$(kvgate -sc install=zsh)"
LBUFFER=$1
$function
"""
FISH_ASKS = "kvgate -sc install=fish | source; complete -C $argv[1]"


@pytest.mark.parametrize(
    ("shell", "program"),
    [
        pytest.param(["zsh", "-f", "-c"], ZSH_ASKS, marks=pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")),
        pytest.param(["fish", "-c"], FISH_ASKS, marks=pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")),
    ],
)
def test_zsh_and_fish_complete(shell: list[str], program: str, tmp_path: Path) -> None:
    name = ["zsh"] if shell[0] == "zsh" else []  # what zsh calls $0
    environ = installed(tmp_path) | {"HOME": str(tmp_path)}
    for line, offered in (("kvgate stage=ev", ["stage=evaluate"]), ("kvgate -m kv=fp8,int8_a", ["kv=fp8,int8_asym"])):
        command = [*shell, program, *name, line]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ, cwd=tmp_path)
        assert (done.stdout.split(), done.stderr) == (offered, "")


def test_a_completion_imports_neither_hydra_nor_what_runs() -> None:
    program = (
        "import sys; sys.argv = ['kvgate', '-sc', 'query=bash']; from pipeline.kvgate import main; main();"
        "print([name for name in ('hydra', 'omegaconf', 'rich', 'pipeline.run', 'torch', 'mlflow') if name in sys.modules])"
    )
    environ = os.environ | {"COMP_LINE": "kvgate stage=ver", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environ)
    assert done.stdout.splitlines() == ["stage=verify", "[]"]
