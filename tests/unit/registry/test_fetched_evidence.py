"""Rollback and promotion in a work directory that judged nothing: the evidence comes from a real SQLite registry."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.registry.judged_work import JudgedWork

from pipeline.config.config import ENVIRONMENT
from pipeline.registry.store_errors import path_of
from pipeline.store.store import PARTIAL
from stages.core.errors import GateRefusal, MissingRequirement

OWN = Path(__file__).resolve().parents[3] / "examples" / "own_samples.jsonl"

pytestmark = pytest.mark.usefixtures("quick_stores", "no_charts")


@pytest.fixture
def judging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JudgedWork:
    """The work directory that judges the engines."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    return JudgedWork(tmp_path / "judging", f"sqlite:///{tmp_path / 'mlflow.db'}", log_bundle=True)


@pytest.fixture
def serving(judging: JudgedWork) -> JudgedWork:
    """A work directory without evidence, with the same registry."""
    return replace(judging, work=judging.work.with_name("serving"))


def test_a_rollback_downloads_and_replays_the_evidence_that_is_not_here(
    judging: JudgedWork, serving: JudgedWork, tmp_path: Path
) -> None:
    judging.judge("int8")
    judging.judge("fp8")
    judging.promote("int8")
    judging.promote("fp8")
    store = judging.store
    registered = path_of(store.client.get_logged_model(store.read().versions["1"].model_id).artifact_location)
    whole = shutil.copytree(registered, tmp_path / "whole")

    def refuse(kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=rf"version 1 \(int8\) cannot become the champion again: .*{message}"):
            serving.command("stage=rollback")
        shutil.rmtree(registered, ignore_errors=True)
        shutil.copytree(whole, registered)

    (registered / "engine" / "weights.bin").write_text("altered")
    refuse(GateRefusal, "engine: weights.bin: differs")
    (registered / "engine" / "weights.bin").unlink()
    refuse(MissingRequirement, "engine: weights.bin: missing")
    shutil.rmtree(registered / "engine")  # as without tracking.log_bundle
    refuse(GateRefusal, "no evidence in this workdir, and no engine in the registry: .*tracking.log_bundle=true")
    (registered / "identity.json").write_text("{}")
    refuse(GateRefusal, "its identity.json is not the one that the registry cites")
    shutil.rmtree(registered)
    refuse(MissingRequirement, "has no files of version 1")
    assert judging.alias("champion") == "fp8"
    serving.command("stage=rollback")
    assert judging.alias("champion") == "int8"
    assert list(serving.artifacts.rglob("weights.bin")) == [], "the download is removed"


def test_a_rollback_needs_the_questions_that_were_asked(judging: JudgedWork, serving: JudgedWork, tmp_path: Path) -> None:
    judging.judge("int8", "workloads=jsonl", f"workloads.jsonl={OWN}")
    judging.judge("fp8")
    judging.promote("int8")
    judging.promote("fp8")
    changed = tmp_path / "other.jsonl"
    changed.write_text(OWN.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    for questions in ([], ["workloads=jsonl", f"workloads.jsonl={changed}"]):
        with pytest.raises(
            MissingRequirement,
            match=r"again: samples, made again: missing, the file that was asked is missing; give workloads=jsonl ",
        ):
            serving.command("stage=rollback", *questions)
    serving.command("stage=rollback", "workloads=jsonl", f"workloads.jsonl={OWN}")
    assert judging.alias("champion") == "int8"


def test_a_champion_of_another_work_directory_competes(
    judging: JudgedWork, serving: JudgedWork, capsys: pytest.CaptureFixture[str]
) -> None:
    judging.judge("int8")
    judging.promote("int8")
    assert judging.store.judged_by(judging.store.read().versions["1"]).tags["checkpoint_digest"] == "c" * 64
    serving.judge("fp8")
    serving.command("stage=promote")
    output = capsys.readouterr().out
    assert "registry: kvgate-some-llm at MLflow's store sqlite:///" in output
    assert "int8 (version 1) stays the champion" in output
    assert "Load it with: pipeline.api.champion('kvgate-some-llm')" in output
    assert PARTIAL not in output


def test_a_promotion_counts_the_attempts_that_the_registry_records(judging: JudgedWork) -> None:
    own = "workloads=jsonl", f"workloads.jsonl={OWN}"
    judging.judge("int8", *own, planned_workloads={"legal": True})  # INCONCLUSIVE, because none of its samples ran
    judging.judge("int8")
    needed = r"int8: PASS, but it did not pass on other questions \(version 1 \(int8\)\): decide it with gates\.attempt=2, or"
    with pytest.raises(GateRefusal, match=needed):
        judging.command("stage=promote")
    judging.command("stage=promote", "gates.attempt=2")
    assert judging.alias("champion") == "int8"
