"""A command's report page: from evidence on disk to a file and to MLflow, and the handling of errors."""

import json
from pathlib import Path

import pytest
from gate_reports import GATES
from judged_engine import candidate_of, config_of, judged_engine

from pipeline.chain import showing
from pipeline.config.config import Config
from pipeline.evidence.identity import IDENTITY_FILE
from pipeline.evidence.reading import read_evidence
from stages.verdict.candidate import Candidate
from stages.verdict.gates import decide

OWN = {"id": "mine-1", "prompt": "our secret recipe: how much salt?", "reference": "two spoons", "workload": "copy"}


class Runs:
    """A tracking store that keeps attached files."""

    def __init__(self) -> None:
        self.attached: dict[str, str] = {}

    def attach(self, run_id: str, files: list[Path]) -> None:
        self.attached[run_id] = files[0].read_text(encoding="utf-8")


def candidate(directory: Path, **changes: object) -> Candidate:
    """Return the candidate whose evidence is in a directory, decided again because a test may have altered its samples."""
    evidence = read_evidence(directory)
    assert evidence.report is not None
    decided = Candidate.decided(decide(evidence.report, evidence.rows, GATES))
    return candidate_of(directory).model_copy(update={**decided, **changes})


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def config_at(work: Path) -> Config:
    return config_of("model.path=/models/some-llm").model_copy(update={"workdir": str(work)})


def show(work: Path, shown: Candidate, store: Runs | None) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(showing, "open_store", lambda *_: store)
        showing.show(config_at(work), [shown], sweep="s")


def test_prompts_of_the_users_own_file_stay_in_the_work_directory(work: Path) -> None:
    jsonl = work.parent / "own.jsonl"
    jsonl.write_text(json.dumps(OWN) + "\n")
    directory = judged_engine(work / "artifacts", ["workloads=jsonl", f"workloads.jsonl={jsonl}"], copy=3)
    rows = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    lost = next(row for row in rows if row["baseline_correct"] and not row["candidate_correct"])
    lost |= {"id": OWN["id"], "reference": OWN["reference"]}
    (directory / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = Runs()
    show(work, candidate(directory), store)
    page = (work / showing.PAGE).read_text(encoding="utf-8")
    assert "stage=verify bundle=" in page
    assert read_evidence(directory).identity.binds["gates"] in page
    assert "our secret recipe" in page
    assert "our secret recipe" not in store.attached["run"]
    assert "two spoons" in store.attached["run"], "answers are MLflow's anyway, in samples.jsonl"


def test_no_store_is_opened_without_a_registered_candidate(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = candidate(judged_engine(work / "artifacts"), version="")
    monkeypatch.setattr(showing, "open_store", lambda *_: pytest.fail("opened"))
    showing.show(config_at(work), [shown], sweep="s")
    assert (work / showing.PAGE).is_file()


def test_evidence_that_cannot_be_read_is_said_on_the_page(work: Path) -> None:
    directory = judged_engine(work / "artifacts")
    shown = candidate(directory)
    (directory / IDENTITY_FILE).write_text("{}")
    show(work, shown, None)
    assert f"{directory / IDENTITY_FILE}: kvgate: Field required" in (work / showing.PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize("fault", ["a directory", "a library", "a store"])
def test_a_page_that_cannot_be_written_is_a_warning(
    work: Path, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, store = candidate(judged_engine(work / "artifacts")), Runs()
    if fault == "a directory":
        (work / showing.PAGE).mkdir()
    elif fault == "a library":
        monkeypatch.setitem(__import__("sys").modules, "stages.report.page", None)
    else:
        monkeypatch.setattr(store, "attach", lambda *_: (_ for _ in ()).throw(OSError("postgresql://me:hunter2@host is away")))
    show(work, shown, store)
    said = capsys.readouterr().err
    assert "pipeline: warning: report.html is not complete: " in said
    assert "hunter2" not in said
    assert not list(work.glob(".report.html.*")), "nothing half-written is left"
