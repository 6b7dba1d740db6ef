"""Runs, tables and versions in a real SQLite store."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.registry.candidates import judged_candidate
from helpers.verdicts.reports import row

from pipeline.chain.job import open_store
from pipeline.config.config import Tracking
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.run_content import COLOURS
from pipeline.registry.store_errors import path_of
from pipeline.registry.tracking import Version, locate
from stages.core.digest import files_digest, tree_files
from stages.core.errors import UserError
from stages.verdict.candidate import Candidate, Cited
from stages.verdict.verdict import Status

SECRET = "hunter2hunter2"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def store(work: Path, quick_stores: None) -> Iterator[MlflowStore]:  # noqa: ARG001
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        opened = open_store(Tracking(), work, "tiny")
        assert opened is not None
        yield opened


def judged(folder: Path, kv: str, verdict: Status = "PASS", **metrics: float) -> Candidate:
    report = json.dumps({"kv": kv, "source": f"https://me:{SECRET}@host/data"})
    return judged_candidate(folder, kv, verdict, metrics={"memory/kib_per_token": 2.0, **metrics}, report=report)


def track_one(store: MlflowStore, candidate: Candidate, sweep: str) -> Candidate:
    return store.register(candidate, sweep=sweep, config={"kv": {"name": candidate.policy}})


def version(store: MlflowStore, candidate: Candidate) -> Version:
    return store.read().versions[candidate.version]


def artifacts(store: MlflowStore, run_id: str) -> dict[str, Path]:
    root = path_of(store.client.get_run(run_id).info.artifact_uri)
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


def test_a_sweep_has_runs_of_candidates_and_of_the_fp16_engine(store: MlflowStore, tmp_path: Path) -> None:
    figures: dict[str, Any] = {"quality/kl_mean": 0.01, "baseline/kib_per_token": 4.0}
    candidate, config = judged(tmp_path, "fp8", "PASS", **figures), {"seed": 0, "kv": {"key": {"dtype": "fp8_e4m3"}}}
    registered = store.register(candidate, [row("copy", 1, True, False)], sweep="s1", config=config)
    lost = judged(tmp_path, "int4", "FAIL", **figures)
    failed = track_one(
        store, lost.model_copy(update={"baseline": registered.baseline, "reasons": ("copy: 9 of 9 answers lost",)}), "s1"
    )
    runs = {item.info.run_name: item for item in store.client.search_runs([store.experiment_id], "tags.sweep = 's1'")}
    assert runs.keys() == {"fp8: PASS", "int4: FAIL", "fp16: baseline"}
    assert runs["fp16: baseline"].data.metrics == {"quality/recovery": 1.0, "memory/kib_per_token": 4.0}
    assert {item.info.status for item in runs.values()} == {"FINISHED"}
    fp8_run = runs["fp8: PASS"]
    assert fp8_run.info.run_id == registered.run_id
    assert fp8_run.data.tags["mlflow.runColor"] == COLOURS["PASS"]
    assert fp8_run.data.params == {"seed": "0", "kv.key.dtype": "fp8_e4m3"}
    assert list(fp8_run.data.metrics.items())[:2] == [("quality/kl_mean_log10", -2.0), ("memory/kib_per_token", 2.0)]
    files = artifacts(store, registered.run_id)
    assert files.keys() >= {"report.json", "samples.json"}
    table = json.loads(files["samples.json"].read_text())
    assert table["columns"][:2] == ["answer", "workload"]
    assert [line[:2] for line in table["data"]] == [["lost", "copy"]]
    assert artifacts(store, failed.run_id).keys() == {"report.json"}
    note = fp8_run.data.tags["mlflow.note.content"]
    assert f"models:/kvgate-tiny/{registered.version} " in note
    for text in (note, str(store.client.get_model_version("kvgate-tiny", registered.version).description)):
        assert text.startswith("**PASS**: `fp8` on onnxruntime")
        assert "mean KL 1.0e-02; 2.000 KiB/token" in text
    description = store.client.get_model_version("kvgate-tiny", failed.version).description
    assert str(description).endswith("- copy: 9 of 9 answers lost")


def test_no_secret_reaches_the_store(work: Path, store: MlflowStore, tmp_path: Path) -> None:
    config = {"hub_token": SECRET, "data": {"uri": f"s3://k:{SECRET}@bucket"}, "note": f"password={SECRET} {'a' * 9000}"}
    reasons = (f"cannot read https://u:{SECRET}@host", "a" * 9000)  # MLflow cuts long tags and parameters
    candidate = judged(tmp_path, "int4", "FAIL").model_copy(update={"reasons": reasons})
    answer = row("copy", 1, True, False, candidate_generation=f"api_key={SECRET}")
    store.register(candidate, [answer], sweep="secrets", config=config)
    written = [path for path in work.rglob("*") if path.is_file()]
    assert any(path.name == "report.json" for path in written)
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


def test_a_run_that_cannot_be_completed_is_closed_as_failed(store: MlflowStore, tmp_path: Path) -> None:
    candidate = judged(tmp_path, "incomplete")
    candidate.report.path.unlink()
    with pytest.raises(FileNotFoundError):
        track_one(store, candidate, "failing")
    (run,) = store.client.search_runs([store.experiment_id], "tags.sweep = 'failing'")
    assert run.info.status == "FAILED"


def test_an_engine_with_the_same_evidence_is_registered_once(store: MlflowStore, tmp_path: Path) -> None:
    candidate = judged(tmp_path, "once")
    first = track_one(store, candidate, "a")
    entry = version(store, first)
    assert entry.tags == {"kv": "once", "verdict": "PASS", "identity_digest": first.identity.digest}
    registered = [{"name": "kvgate-tiny", "version": first.version}]
    assert json.loads(store.client.get_logged_model(entry.model_id).tags["mlflow.modelVersions"]) == registered
    store.client.delete_logged_model_tag(entry.model_id, "mlflow.modelVersions")  # as a killed command leaves it
    again, another_sweep = track_one(store, candidate, "a"), track_one(store, candidate, "b")
    assert first.version == again.version == another_sweep.version
    assert len({candidate.run_id for candidate in (first, again, another_sweep)}) == 3
    model = store.client.get_logged_model(entry.model_id)
    assert json.loads(model.tags["mlflow.modelVersions"]) == registered
    outputs = store.client.get_run(another_sweep.run_id).outputs
    assert outputs is not None
    assert [output.model_id for output in outputs.model_outputs] == [model.model_id]
    judged_by = store.judged_by(entry)
    assert judged_by.tags["engine_digest"] == candidate.engine.digest
    assert judged_by.metrics == {"memory/kib_per_token": 2.0}
    assert store.judged_by(replace(entry, run_id="")).metrics == {}, "a version that was registered by hand"


def test_other_evidence_is_another_version(store: MlflowStore, tmp_path: Path) -> None:
    good, bad = judged(tmp_path, "good"), judged(tmp_path, "bad", "FAIL")
    passed = track_one(store, good, "a")
    track_one(store, bad, "a")
    assert store.read().aliases["candidate"] == passed.version, "another engine that failed does not move it"
    undecided = track_one(store, good.model_copy(update={"verdict": "INCONCLUSIVE"}), "b")
    assert store.read().aliases["candidate"] == undecided.version
    failed = track_one(store, good.model_copy(update={"verdict": "FAIL"}), "c")
    assert "candidate" not in store.read().aliases, "the same engine failed"
    identity = Cited(path=good.identity.path, digest="other")
    with_other_evidence = track_one(store, good.model_copy(update={"identity": identity}), "d")
    assert len({candidate.version for candidate in (passed, undecided, failed, with_other_evidence)}) == 4


@pytest.mark.parametrize("log_bundle", [True, False])
def test_a_version_has_its_evidence_and_optionally_its_bundle(
    log_bundle: bool, store: MlflowStore, work: Path, tmp_path: Path
) -> None:
    configured = MlflowStore(locate(Tracking(log_bundle=log_bundle), work, "tiny"))
    registered = track_one(configured, judged(tmp_path, f"bundle {log_bundle}"), "a")
    model = store.client.get_logged_model(version(store, registered).model_id)
    assert (str(model.model_type), str(model.status)) == ("engine", "READY")
    root = path_of(model.artifact_location)
    assert {"identity.json", "report.json", "samples.jsonl"} <= {path.name for path in root.iterdir()}
    assert (root / "engine").exists() == log_bundle
    assert not log_bundle or files_digest(tree_files(root / "engine")) == registered.engine.digest


def test_a_copied_work_directory_never_writes_to_the_original(store: MlflowStore, work: Path) -> None:
    copy = shutil.copytree(work, work.with_name("copy"))
    with pytest.raises(
        UserError, match=f"is a copy, .* files in {work}/mlartifacts: .*rm -r {copy}/mlflow.db {copy}/mlartifacts"
    ):
        MlflowStore(locate(Tracking(), copy, "tiny"))
    MlflowStore(locate(Tracking(uri=store.location.uri), copy, "tiny"))  # another work directory may use the original's store


def test_a_moved_work_directory_keeps_its_runs_and_models(store: MlflowStore, work: Path, tmp_path: Path) -> None:
    registered = track_one(store, judged(tmp_path / "judged", "moved"), "before")
    original = work.rename(work.with_name("hidden"))
    try:
        there = Path(shutil.copytree(original, tmp_path / "dé placé #1 [a=b] '{x}"))
        moved = MlflowStore(locate(Tracking(), there, "tiny"))
        assert artifacts(moved, registered.run_id).keys() == {"report.json"}
        assert moved.download(version(moved, registered), tmp_path).is_dir()
        track_one(moved, judged(tmp_path / "after", "after", "FAIL"), "after")
        assert not work.exists()
    finally:
        original.rename(work)


def test_files_that_were_moved_without_their_store_are_refused(store: MlflowStore, work: Path, tmp_path: Path) -> None:
    (work / "mlartifacts").rename(tmp_path / "mlartifacts")
    try:
        with pytest.raises(UserError, match=f"has its files in {work}/mlartifacts, which was moved to {tmp_path}/mlartifacts"):
            MlflowStore(locate(Tracking(uri=store.location.uri), tmp_path, "tiny"))
    finally:
        (tmp_path / "mlartifacts").rename(work / "mlartifacts")
