"""The Python API: evaluations and engines run in the user's process and leave its settings unchanged."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import mlflow
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import pipeline.__main__ as command
import pipeline.api
from pipeline.api import Evaluation, LoadedEngine, MissingRequirement, UserError, champion, evaluate, load
from pipeline.config.override_syntax import written
from pipeline.registry import summary

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "examples" / "own_samples.jsonl"
SETTINGS: dict[str, Any] = {
    "workloads": "jsonl",
    "workloads.jsonl": SAMPLES,
    "workloads.stress_test": {"max_tokens": 128, "decode_steps": 8, "offset_steps": 1, "max_batch": 2, "requests": 2},
    "workloads.load": {"batch": 2, "context_tokens": 64, "new_tokens": 8},
    "calibration.samples": 1,
    "backend.threads": 1,
    "gates.max_ruined_share": 0.1,
}
"""The example's samples, and settings that make a run short."""
ANSWER = "04 Bergen 14 Tartu"
QUESTION = f"Copy:\n{ANSWER}"


def arguments(values: dict[str, Any]) -> list[str]:
    return [f"{key}={written(value)}" for key, value in values.items()]


def run_command(*overrides: str) -> int:
    """Run the command line in this process."""
    with patch.object(sys, "argv", ["kvgate", *overrides]):
        return command.main()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A work directory with its own store. The tests run in its parent directory."""
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setattr(sys, "argv", list(sys.argv))
        yield folder / "work"


@pytest.fixture(scope="module")
def judged(work: Path) -> Evaluation:
    """A passing candidate, which the command line has promoted."""
    result = evaluate("tiny", "int8", workdir=work, **SETTINGS)
    assert result.verdict == "PASS", result.reasons
    assert run_command("stage=promote", f"workdir={work}", *arguments(SETTINGS)) == 0
    return result


def test_an_evaluation_has_a_verdict_and_a_typed_report(judged: Evaluation, work: Path) -> None:
    assert (judged.verdict, judged.candidate.policy) == ("PASS", "int8"), judged.reasons
    assert {check.status for check in judged.checks} <= {"PASS", "WARNING"}
    assert judged.report.engine_digest == judged.candidate.engine.digest
    assert len(judged.rows) == judged.report.samples == 44
    assert judged.report.overall.fidelity.kl_mean == judged.candidate.metrics["quality/kl_mean"]
    assert judged.candidate.version, "the evaluation is tracked"
    assert summary.load(work).candidates == (judged.candidate,)
    assert repr(judged).startswith("Evaluation(int8 of tiny: PASS up to ")


def test_the_command_line_reuses_the_apis_artifacts_and_verdict(judged: Evaluation, work: Path) -> None:
    artifacts = set((work / "artifacts").glob("*/*"))
    assert run_command("stage=evaluate", "kv=int8", f"workdir={work}", *arguments(SETTINGS)) == 0
    assert set((work / "artifacts").glob("*/*")) == artifacts
    (again,) = summary.load(work).candidates
    assert (again.identity, again.version) == (judged.candidate.identity, "1")


def test_a_failed_verdict_is_returned_and_nothing_is_printed(
    judged: Evaluation, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = evaluate("tiny", "int4_tensor", workdir=work, tracking="none", **SETTINGS)
    assert capfd.readouterr() == ("", ""), "nothing is printed without verbose=True"
    assert failed.verdict == "FAIL"
    assert any(check.status == "FAIL" for check in failed.checks)
    assert summary.load(work).exit_code == 3
    assert judged.bundle != failed.bundle


@pytest.mark.usefixtures("judged")
def test_the_users_process_is_unchanged(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.yaml").write_text("own: 7\n")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "overwritten by MLflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/theirs.db")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    streams, argv, environment = (sys.stdout, sys.stderr), list(sys.argv), os.environ.get("MLFLOW_TRACKING_URI")
    try:
        with initialize_config_dir(str(tmp_path), version_base="1.2"):
            theirs = GlobalHydra.instance().hydra
            uri: dict[str, Any] = {"tracking.uri": f"sqlite:///{work}/mlflow.db"}
            result = evaluate("tiny", "int8", workdir=work, verbose=True, **uri, **SETTINGS)
            assert GlobalHydra.instance().hydra is theirs
            assert hydra_compose("theirs").own == 7
        assert mlflow.get_tracking_uri() == f"sqlite:///{tmp_path}/theirs.db"
        assert os.environ.get("MLFLOW_TRACKING_URI") == environment
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]
    assert result.verdict == "PASS"
    assert "PASS int8: keeps " in capsys.readouterr().out, "verbose=True prints the verdict"
    assert handlers == {number: signal.getsignal(number) for number in handlers}
    assert (streams, argv) == ((sys.stdout, sys.stderr), sys.argv)
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize(
    ("raised", "expected"), [(PermissionError(13, "Permission denied"), MissingRequirement), (KeyError("defect"), KeyError)]
)
def test_machine_errors_become_missing_requirements_and_defects_pass_through(
    raised: Exception, expected: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.api.evaluations.run", Mock(side_effect=raised))
    with pytest.raises(expected):
        evaluate("tiny", "int8", workdir=tmp_path / "work")


def test_a_judged_engine_is_loaded_and_answers(judged: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with load(judged.bundle) as engine:
        assert engine.generate(QUESTION) == ANSWER
        assert engine.generate([{"role": "user", "content": QUESTION}]) == ANSWER
        assert len(engine.tokenizer.text_ids(engine.generate(QUESTION, max_new_tokens=2))) <= 2
        assert engine.memory().live_tokens == 0, "the cache is free after an answer"
        assert engine.policy.name in repr(engine)
    assert repr(engine).endswith(f"closed: {judged.bundle})")
    with pytest.raises(UserError, match="was closed; load it again"):
        engine.generate(QUESTION)


def test_bundles_of_another_backend_and_of_evidence_load(judged: Evaluation) -> None:
    """Load the bundle of the reference engine, and the engine from the evidence of its verdict."""
    texts = {folder: (folder / "bundle.json").read_text() for folder in judged.bundle.parent.glob("[!.]*")}
    names = {folder: (folder / "kv_policy.json").read_text() for folder in texts}
    reference = next(folder for folder in texts if '"torch"' in texts[folder] and "int8" in names[folder])
    for place, backend in ((reference, "torch"), (judged.candidate.identity.path.parent, "onnxruntime")):
        with load(str(place), threads=1) as engine:
            assert (engine.backend, engine.policy.name) == (backend, "int8")
            assert engine.generate(QUESTION) == ANSWER


@pytest.mark.parametrize("name", ["tiny", "kvgate-tiny"])
@pytest.mark.usefixtures("judged")
def test_the_champion_is_found_by_checkpoint_or_model_name(work: Path, name: str) -> None:
    with champion(name, workdir=work) as engine:
        assert isinstance(engine, LoadedEngine)
        assert engine.bundle.is_relative_to(work), "the engine is not fetched from its work directory"
        assert engine.generate(QUESTION) == ANSWER


@pytest.mark.usefixtures("judged")
def test_a_fetched_champion_is_verified_and_removed_on_close(work: Path, tmp_path: Path) -> None:
    store = f"sqlite:///{work}/mlflow.db"
    renamed = shutil.copyfile(SAMPLES, tmp_path / "renamed.jsonl")
    with pytest.raises(MissingRequirement, match="samples, made again: missing"):
        champion("tiny", tracking_uri=store, workdir=tmp_path / "elsewhere")
    with champion("tiny", tracking_uri=store, workdir=tmp_path / "elsewhere", samples=renamed) as engine:
        assert not engine.bundle.is_relative_to(work)
        assert engine.generate(QUESTION) == ANSWER
    assert not engine.bundle.exists()
    assert list(tmp_path.iterdir()) == [renamed], "fetching writes nothing"


@pytest.mark.usefixtures("judged")
def test_the_python_blocks_of_the_documentation_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/start.md", "docs/extend.md")]
    blocks = [block for text in texts for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)]
    assert len(blocks) == 2
    monkeypatch.setattr(pipeline.api, "evaluate", lambda *args, **options: evaluate(*args, **{**SETTINGS, **options}))
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "documentation", "exec"), names)
    assert names["mine"].candidate.policy == "int8_sinks"
    assert ANSWER in capsys.readouterr().out
