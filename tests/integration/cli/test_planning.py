"""stage=capacity and stage=recommend with only a config.json: output, files and refusals."""

import json
import re
import shlex
from pathlib import Path

import pytest
from checkpoints import LLAMA_8B
from judged_engine import config_of

from pipeline.chain import planning
from pipeline.chain.planning import recommend_policy, show_capacity
from stages.core.errors import GateRefusal

ROOT = Path(__file__).resolve().parents[3]
CONF = ROOT / "conf" / "kv"


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """Arguments for a model that consists only of a config.json."""
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return [f"model.path={folder}", f"workdir={tmp_path / 'work'}"]


def test_a_config_json_alone_gives_the_capacity_of_every_policy_as_table_and_json(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = ["capacity.gpu_gib=45", "capacity.weights_gib=0", "capacity.reserve_gib=0"]
    show_capacity(config_of(*asked, "stage=capacity", "kv=fp8", "kv.sink_tokens=4", *bare))
    said = capsys.readouterr().out
    found = {entry["name"]: entry for entry in json.loads((tmp_path / "work" / "capacity.json").read_text())["policies"]}
    assert {path.stem for path in CONF.glob("*.yaml")} | {"fp8 kv.sink_tokens=4"} == found.keys()
    assert all(f" {name} " in said for name in found)
    assert (found["int4_g64"]["tokens_that_fit"], "1,387,821" in said) == (1_387_821, True)
    assert {path.name for path in (tmp_path / "llama-8b").iterdir()} == {"config.json"}


def test_the_memory_in_the_documents_is_the_output_of_the_command(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "serve-8b.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^kvgate (stage=capacity .*)$", page, re.MULTILINE)
    show_capacity(config_of(*shlex.split(command), *asked))
    printed = capsys.readouterr().out
    for line in re.findall(r"^(?:fp8: a request|80 GiB).*$", page, re.MULTILINE):
        assert line in printed


def test_a_budget_that_no_policy_meets_is_refused_with_the_most_that_one_admits(asked: list[str]) -> None:
    use = ["capacity.gpu_gib=17", "capacity.reserve_gib=0", "capacity.concurrency=500"]
    with pytest.raises(GateRefusal, match=r"capacity\.concurrency=500: no policy admits this many requests, int4_streaming "):
        show_capacity(config_of(*asked, "stage=capacity", *use))


def test_without_evidence_nothing_is_recommended_and_no_store_is_made(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed command for the evidence repeats this command's options, except its policy."""
    own = ["stage=recommend", "gates.max_mean_kl=0.02", "kv=int8", "capacity.gpu_gib=80"]
    monkeypatch.setattr(planning, "typed", lambda: own)
    with pytest.raises(GateRefusal, match="no policy has evidence that covers this use: nothing is recommended"):
        recommend_policy(config_of(*asked, *own))
    assert "-m gates.max_mean_kl=0.02 'workloads.lengths=[32768]' stage=evaluate kv=int4_streaming," in capsys.readouterr().out
    assert not list(tmp_path.rglob("mlflow.db"))
