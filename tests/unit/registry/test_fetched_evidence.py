"""Rollback and promotion in a work directory that judged nothing: the evidence comes from a real SQLite registry."""

import shutil
from pathlib import Path

import pytest
from helpers.commands.jobs import run_job
from helpers.registry.judged_engine import SAMPLES, candidate_of, config_of, judged_engine

from pipeline.config.config import ENVIRONMENT, Tracking
from pipeline.registry import summary
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.store_errors import path_of
from pipeline.registry.tracking import locate
from pipeline.store.store import PARTIAL
from stages.core.errors import GateRefusal, MissingRequirement

OWN = Path(__file__).resolve().parents[3] / "examples" / "own_samples.jsonl"

pytestmark = pytest.mark.usefixtures("quick_stores", "no_charts")


class Fleet:
    """A registry and the work directory that judged its engines, with a second work directory that has no evidence."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.uri, self.name = uri, f"kvgate-{folder.name}"
        self.judging, self.serving = folder / "judging", folder / "serving"

    def store(self) -> MlflowStore:
        return MlflowStore(locate(Tracking(uri=self.uri, model_name=self.name), self.judging, "some-llm", {}))

    def judge(self, kv: str, *workloads: str, work: Path | None = None, **measured: object) -> None:
        """Judge and register an engine. `measured` are fields of the report."""
        work = work or self.judging
        evidence = judged_engine(work / "artifacts", workloads or SAMPLES, kv=kv, measured=measured)
        candidate = candidate_of(evidence).model_copy(update={"version": ""})
        summary.record(work, kv, self.store().register(candidate, sweep=kv, config={}))

    def arguments(self, *overrides: str, work: Path | None = None) -> list[str]:
        where = f"workdir={work or self.serving}", f"tracking.uri={self.uri}", f"tracking.model_name={self.name}"
        keys = {part.partition("=")[0]: part for part in (*where, "model.path=/models/some-llm", *overrides)}
        return list(keys.values())

    def command(self, *overrides: str, work: Path | None = None) -> None:
        run_job(config_of(*self.arguments(*overrides, work=work)), "20260105-000000-1-e")

    def promote(self, *names: str) -> None:
        for name in names:
            self.command("stage=promote", f"promote.sweep={name}", f"promote.name={name}", work=self.judging)

    def champion(self) -> str:
        return self.store().read().pointed_at["champion"].name


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    return Fleet(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path)


def test_a_rollback_downloads_and_replays_the_evidence_that_is_not_here(fleet: Fleet, tmp_path: Path) -> None:
    fleet.judge("int8")
    fleet.judge("fp8")
    fleet.promote("int8", "fp8")
    store = fleet.store()
    registered = path_of(store.client.get_logged_model(store.read().versions["1"].model_id).artifact_location)
    whole = shutil.copytree(registered, tmp_path / "whole")

    def refuse(kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=rf"version 1 \(int8\) cannot become the champion again: .*{message}"):
            fleet.command("stage=rollback")
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
    assert fleet.champion() == "fp8"
    fleet.command("stage=rollback")
    assert fleet.champion() == "int8"
    assert list((fleet.serving / "artifacts").rglob("weights.bin")) == [], "the download is removed"


def test_a_rollback_needs_the_questions_that_were_asked(fleet: Fleet, tmp_path: Path) -> None:
    fleet.judge("int8", "workloads=jsonl", f"workloads.jsonl={OWN}")
    fleet.judge("fp8")
    fleet.promote("int8", "fp8")
    changed = tmp_path / "other.jsonl"
    changed.write_text(OWN.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    for questions in ([], ["workloads=jsonl", f"workloads.jsonl={changed}"]):
        with pytest.raises(
            MissingRequirement,
            match=r"again: samples, made again: missing, the file that was asked is missing; give workloads=jsonl ",
        ):
            fleet.command("stage=rollback", *questions)
    fleet.command("stage=rollback", "workloads=jsonl", f"workloads.jsonl={OWN}")
    assert fleet.champion() == "int8"


def test_a_champion_of_another_work_directory_competes(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.judge("int8")
    fleet.promote("int8")
    assert fleet.store().judged_by(fleet.store().read().versions["1"]).tags["checkpoint_digest"] == "c" * 64
    fleet.judge("fp8", work=fleet.serving)
    fleet.command("stage=promote")
    output = capsys.readouterr().out
    assert f"registry: {fleet.name} at MLflow's store sqlite:///" in output
    assert "int8 (version 1) stays the champion" in output
    assert f"Load it with: pipeline.api.champion('{fleet.name}')" in output
    assert PARTIAL not in output


def test_a_promotion_counts_the_attempts_that_the_registry_records(fleet: Fleet) -> None:
    own = "workloads=jsonl", f"workloads.jsonl={OWN}"
    fleet.judge("int8", *own, planned_workloads={"legal": True})  # INCONCLUSIVE, because none of its samples ran
    fleet.judge("int8")
    needed = r"int8: PASS, but it did not pass on other questions \(version 1 \(int8\)\): decide it with gates\.attempt=2, or"
    with pytest.raises(GateRefusal, match=needed):
        fleet.command("stage=promote", work=fleet.judging)
    fleet.command("stage=promote", "gates.attempt=2", work=fleet.judging)
    assert fleet.champion() == "int8"
