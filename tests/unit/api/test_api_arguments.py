"""Wrong arguments of the Python API raise one exception each before anything is loaded; pipeline.lm_eval without lm-eval."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.engines.fake import CharTokenizer
from helpers.refusals import refused
from helpers.registry.evidence_copies import edit
from helpers.registry.judged_engine import exported, judged_engine, make_champion
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from pipeline.api import MissingRequirement, UserError, champion, engines, evaluate, load
from pipeline.api.engines import LoadedEngine
from pipeline.config.override_syntax import written
from pipeline.evidence import reading
from pipeline.lm_eval.__main__ import main
from pipeline.registry.tracking import Location
from stages.verdict.verdict import RULES

UNUSED = LoadedEngine.__new__(LoadedEngine)
"""An engine that must refuse arguments without being used."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: evaluate("tiny", "int8", dry=True), "dry=True: is a key of the command line only; leave it out"),
        (lambda: evaluate("tiny", "int8", stage="build"), "stage=build: is a key of the command line only; leave it out"),
        (
            lambda: evaluate("tiny", "int8", gates={"min_recovery": 0.9}),
            "pass the name of an option, or the keys one by one, as in **{'gates.KEY': VALUE}",
        ),
        (lambda: evaluate("tiny", "int8", **{"kv.name": "fp8"}), "kv.name=fp8: is the name of a shipped policy"),  # type: ignore[arg-type]
        (lambda: evaluate("tiny", "int8", seed="1"), "seed: input should be a valid integer (got '1')"),
        (lambda: load("engine", kv="fp8"), "give keys of backend.* alone"),
        (lambda: load("engine", threads=0), "backend.threads: input should be greater than or equal to 1"),
        (lambda: load("nowhere"), "no such directory"),
        (lambda: load(""), "bundle=: is empty; give a path"),
        (lambda: load("a" * 5000), "is too long for a path; give a shorter one"),
        (lambda: champion(None), "model=None: is not a model"),  # type: ignore[arg-type]
        (lambda: champion("tiny", trusted=None), "trusted=None: is not a list of files"),  # type: ignore[arg-type]
        (lambda: champion("tiny", samples=5), "samples=5: is not a path"),  # type: ignore[arg-type]
        (lambda: champion("tiny", workdir=3), "workdir: input should be a valid string (got 3)"),  # type: ignore[arg-type]
        (lambda: UNUSED.generate([], 8), "prompt: [] is not a prompt"),
        (lambda: UNUSED.generate(b"hello", 8), "prompt: b'hello' is not a prompt"),  # type: ignore[arg-type]
        (lambda: UNUSED.generate([{"role": "bot", "content": "x"}], 8), "with a role of system, user, assistant"),
        (lambda: UNUSED.generate([{"role": "user", "content": "x", "name": "y"}], 8), "and no other keys"),
        (lambda: UNUSED.generate("hello", 0), "max_new_tokens=0: must be a whole number of at least 1"),
    ],
)
def test_a_wrong_argument_is_refused_before_any_work(
    call: Callable[[], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "bundle.json").write_text(json.dumps({"backend": "onnxruntime"}))
    with refused(UserError, "", message):
        call()
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


TEXTS = ["fp8", "a b", "tr'ue", "x\\", "true", "NaN", "8K", "1e5", ".5", "a,b", "../x y", "./x"]
TEXTS += ["m\u00fcnchen", "http://h:1/v1", "a=b", "~"]
VALUES = [*TEXTS, None, True, 1, -0.5, {"a": "b:c", "d": [1, "x,y", None]}]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_is_written_so_that_hydra_reads_it_back(value: object) -> None:
    read = OverridesParser.create().parse_override(f"key={written(value)}").value()
    assert OmegaConf.to_container(OmegaConf.create({"key": read})) == {"key": value}


def test_a_champion_is_found_by_the_path_of_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow refuses a path as the name of a model."""
    from pipeline.registry import mlflow_store

    monkeypatch.setattr(Location, "exists", True)
    monkeypatch.setattr(mlflow_store, "RegistryReader", lambda _: SimpleNamespace(champion=lambda _: None))
    with refused(UserError, "model=/models/Qwen3: the registry has no champion of kvgate-Qwen3;"):
        champion("/models/Qwen3", workdir=tmp_path)


@pytest.mark.parametrize("uri", [None, "sqlite:///{}/none.db"])
def test_a_store_that_is_not_there_is_named_and_not_made(uri: str | None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its file is missing or empty; give the store that a promotion wrote to"):
        champion(Path("models/Qwen3"), workdir=tmp_path / "empty", tracking_uri=uri and uri.format(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_download_without_engine_or_extra_samples_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded = judged_engine(tmp_path / "artifacts")
    make_champion(monkeypatch, downloaded)
    assert reading.read_evidence(downloaded).engine is not None, "in ../../build"
    with refused(
        MissingRequirement, "the champion of tiny, version 1 (int8): ", "no engine in the registry", "log_bundle=true"
    ):
        champion("tiny", workdir=tmp_path / "elsewhere")
    (downloaded / "engine").mkdir()
    with refused(UserError, "samples=", "mine.jsonl: the champion was judged on generated samples alone"):
        champion("tiny", workdir=tmp_path / "elsewhere", samples="mine.jsonl")


def test_a_downloaded_champion_is_loaded_from_its_engine_folder(tmp_path: Path) -> None:
    """MLflow stores `bundle.json` next to `identity.json`, and the command that stage=verify prints loads this directory."""
    copy = exported(judged_engine(tmp_path / "store"), tmp_path / "copy", "engine")
    shutil.copyfile(copy / "engine" / "bundle.json", copy / "bundle.json")
    edit(copy / "identity.json", lambda identity: identity["verdict"].update(rules=RULES - 1))
    assert engines._engine_directory(copy) == copy / "engine"
    (copy / "identity.json").unlink()
    assert engines._engine_directory(copy) == copy


def test_a_list_of_prompts_is_one_batch() -> None:
    class EchoEngine:
        policy = None

        def generate(self, prompts: list[list[int]], *_: object) -> list[list[int]]:
            return [prompt[-1:] * len(prompts) for prompt in prompts]

    engine = LoadedEngine(EchoEngine(), CharTokenizer(), Path(), "onnxruntime", 128)  # type: ignore[arg-type]
    conversation = [{"role": "user", "content": "b"}]
    assert engine.generate("a") == "a"
    assert engine.generate(conversation) == "b"
    assert engine.generate(["a", conversation]) == ["aa", "bb"]
    with pytest.raises(UserError, match="is not a prompt"):
        engine.generate([])


def test_without_lm_eval_the_command_exits_4_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval" or name == "pipeline.lm_eval.model"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main() == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pipeline.lm_eval: error: lm_eval is not installed here: pip install")
