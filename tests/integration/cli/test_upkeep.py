"""A work directory of several sweeps with its registry: the output of stage=status, and the effects of stage=prune."""

import fcntl
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Timer

import pytest
from bad_input.forks import contents
from helpers.commands.interruptions import attempt
from helpers.registry.evidence_copies import edit
from helpers.registry.judged_engine import config_of
from helpers.registry.judged_work import JudgedWork
from rich.filesize import decimal

from pipeline.cli import upkeep
from pipeline.cli.upkeep import find_removable, remove, show_status
from pipeline.config.config import ENVIRONMENT
from pipeline.evidence.identity import read_identity
from pipeline.evidence.retention import Inventory, Piece, take_inventory, walk
from pipeline.registry import summary
from pipeline.store import locks
from pipeline.store.store import IN_USE, MANIFEST, PARTIAL, Store, used
from stages.core.artifact import Recipe
from stages.core.digest import file_digest, tree_files
from stages.core.errors import GateRefusal, MissingRequirement, UserError

SWEEPS = {"20260101-000000-1-a": "int8_tensor", "20260102-000000-1-b": "int8", "20260103-000000-1-c": "fp8"}
LAST = "20260104-000000-1-d"
"""The sweep of fp8k_int4v, which is not promoted yet."""


pytestmark = pytest.mark.usefixtures("no_charts")


@pytest.fixture(autouse=True)
def _no_other_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def write_one(out: Path) -> None:
    (out / "one.txt").write_text("one")


def removable_in(work: JudgedWork, *overrides: str) -> list[Piece]:
    return find_removable(work.config("stage=prune", *overrides))


def identity_of(work: JudgedWork, kv: str) -> Path:
    """Return the identity.json of a policy's engine."""
    (path,) = [path for path in work.artifacts.glob("identity/*/identity.json") if read_identity(path).policy == kv]
    return path


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, quick_stores: None) -> JudgedWork:  # noqa: ARG001
    """int8_tensor is from an old sweep, int8 the previous champion, fp8 the champion, fp8k_int4v newer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ENVIRONMENT, raising=False)
        patch.setattr("stages.report.page.draw_charts", lambda _: {})
        ground = JudgedWork(tmp_path_factory.mktemp("upkeep") / "work")
        for sweep, kv in SWEEPS.items():
            ground.judge(kv, sweep=sweep)
            if kv != "int8_tensor":
                ground.promote(kv, sweep)
        ground.judge("fp8k_int4v", sweep=LAST)
        Store(ground.artifacts).make(Recipe("extremes", {}, {}), write_one)
    return ground


@pytest.fixture
def copied(ground: JudgedWork, tmp_path: Path) -> JudgedWork:
    """A copy that a test may change. Its tracking store lies outside: MLflow's store of a copied work directory is refused."""
    work = Path(shutil.copytree(ground.work, tmp_path / "work"))
    shutil.move(work / "mlflow.db", tmp_path)
    return JudgedWork(work, f"sqlite:///{tmp_path / 'mlflow.db'}")


def broken(artifacts: Path) -> list[str]:
    """Return the artifacts with missing or altered files."""
    altered = []
    for manifest in artifacts.glob(f"[!.]*/[!.]*/{MANIFEST}"):
        if tree_files(manifest.parent) != json.loads(manifest.read_text())["files"]:
            altered.append(str(manifest.parent))
    return altered


def test_status_shows_champion_candidates_and_disk_space(ground: JudgedWork, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(ground.work)
    ground.command("stage=prune", "prune.keep_sweeps=1")
    assert "prune.keep_sweeps=1 prune.apply=true" in capsys.readouterr().out, "it only lists files"
    ground.command("stage=status")
    output = capsys.readouterr().out
    assert contents(ground.work) == before, "neither writes anything"
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert lines[0].startswith("registry: kvgate-some-llm at MLflow's store sqlite:///")
    serves = [line.split()[:4] for line in lines if line.startswith(("champion ", "previous ", "candidate 4"))]
    assert serves == [
        ["champion", "3", "fp8", "PASS"],
        ["previous", "2", "int8", "PASS"],
        ["candidate", "4", "fp8k_int4v", "PASS"],
    ]
    assert re.search(r"champion: promoted \S+ \S+ UTC by \S+@\S+, over version 2 \(int8\)", output)
    assert [line.split()[1] for line in lines if line.startswith("sweep ")] == [LAST, *list(SWEEPS)[:0:-1]]
    assert "and 1 earlier sweeps" in lines
    assert {"build 5", "identity 4"} <= {" ".join(line.split()[:2]) for line in lines}
    files = {(p.stat().st_ino, p.stat().st_size) for p in ground.artifacts.glob("[!.]*/[!.]*/**/*") if p.is_file()}
    assert f"{decimal(sum(size for _, size in files))} in total; files that several kinds share count once" in lines
    ground.command("stage=status", "tracking.uri=sqlite:///nowhere.db")
    assert "nowhere.db (tracking.uri or MLFLOW_TRACKING_URI): its file is missing or empty" in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["the tag", "the identity", "a byte of the identity", "nothing: older rules judged it"])
def test_a_serving_engine_stays_even_with_a_lost_or_old_identity(
    lost: str, copied: JudgedWork, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = identity_of(copied, "fp8")
    (engine, *_) = read_identity(identity).reads
    if lost == "the tag":
        copied.store.client.delete_model_version_tag("kvgate-some-llm", "3", "identity_digest")
    elif lost == "the identity":
        shutil.rmtree(identity.parent)
    elif lost == "a byte of the identity":
        identity.write_bytes(identity.read_bytes() + b" ")
    else:
        edit(identity, lambda written: (written["gates"].update(alpha=0.05), written["verdict"].update(rules=14)))
        copied.store.set_tags("3", {"identity_digest": file_digest(identity)})
    copied.command("stage=prune", "prune.keep_sweeps=1", "prune.apply=true")
    assert (copied.artifacts / engine.place).is_dir()
    assert identity.exists() or "nothing" not in lost
    assert "Removed" in capsys.readouterr().out, "artifacts that nothing needs are removed"


def test_a_killed_prune_leaves_whole_artifacts(ground: JudgedWork, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(ground.artifacts, tmp_path / "artifacts", symlinks=True))
    removable = removable_in(ground, "prune.keep_sweeps=1")
    needed = {piece.place for piece in walk(ground.artifacts)} - {piece.place for piece in removable}

    def still_removable(artifacts: Path) -> list[Piece]:
        present = {piece.place: piece for piece in walk(artifacts)}
        return [present[piece.place] for piece in removable if piece.place in present]

    operations = attempt(partial(remove, copied, still_removable(copied)), copied).operations
    assert operations > len(removable)
    for at in range(2, operations, operations // 4):
        shutil.rmtree(copied)
        shutil.copytree(ground.artifacts, copied)
        assert attempt(partial(remove, copied, still_removable(copied)), copied, at).code == -signal.SIGKILL
        assert broken(copied) == []
        assert needed <= {piece.place for piece in walk(copied)}
        Store(copied).make(Recipe("demo", {"at": at}, {}), write_one)
        assert list((copied / PARTIAL).glob("*/*")) == [], "the next command that makes something removes leftovers"


def test_prune_and_use_of_artifacts_exclude_each_other(
    ground: JudgedWork, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(ground.artifacts)
    with (
        used(ground.artifacts),
        pytest.raises(MissingRequirement, match=r"another command uses the artifacts .*nothing was removed"),
    ):
        ground.command("stage=prune", "prune.keep_sweeps=0", "prune.apply=true")
    assert contents(ground.artifacts) == before
    # Conversely, a command that starts while artifacts are removed waits and prints the reason.
    monkeypatch.setattr(locks, "QUIET_S", 0.01)
    with (ground.artifacts / IN_USE).open("rb") as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        Timer(0.2, fcntl.flock, [removing, fcntl.LOCK_UN]).start()
        with used(ground.artifacts):
            assert "some of which are being removed: another process holds" in " ".join(capsys.readouterr().err.split())


def test_nothing_is_removed_if_it_is_unknown_what_serves(ground: JudgedWork, copied: JudgedWork, tmp_path: Path) -> None:
    for overrides in ("tracking=none", f"tracking.uri=sqlite:///{tmp_path / 'other.db'}"):
        with pytest.raises(UserError, match="it is unknown which engines serve"):
            removable_in(ground, overrides)
    unreadable = copied.artifacts / "identity" / ("f" * 32)
    unreadable.mkdir()
    for name in (MANIFEST, "identity.json"):
        (unreadable / name).write_text("{}")
    with pytest.raises(UserError, match=r"identity.json: .* it may name needed artifacts"):
        removable_in(copied)
    shutil.rmtree(unreadable)
    for content in ("{", "{}"):
        (copied.work / "summaries" / f"{LAST}.json").write_text(content)
        with pytest.raises(UserError, match=f"stage=prune: .*{LAST}.json is damaged"):
            removable_in(copied)


def test_a_busy_store_is_not_to_be_removed(ground: JudgedWork, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Inventory([], problems=[MissingRequirement("the store did not answer; raise tracking.timeout_s")])
    monkeypatch.setattr(upkeep, "take_inventory", lambda _: busy)
    with pytest.raises(MissingRequirement, match=r"raise tracking.timeout_s; it may name needed artifacts$"):
        removable_in(ground)


def test_artifacts_of_an_unfinished_sweep_are_kept(copied: JudgedWork) -> None:
    assert any(piece.kind == "extremes" for piece in removable_in(copied))
    summary.note(copied.work, "20260108-000000-1-h", names=("fp8", "int8"), began=time.time() - 3600)
    assert removable_in(copied) == [], "all artifacts are newer than the unfinished sweep"
    assert any(piece.kind == "extremes" for piece in removable_in(copied, "prune.keep_sweeps=0"))


@pytest.mark.parametrize(
    ("make", "problem"), [(os.mkfifo, "is a pipe, a socket or a device"), (Path.mkdir, "(Is a directory); give a")]
)
def test_pipes_and_directories_as_evidence_are_reported_at_once(
    make: Callable[[Path], object], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("summaries/20260301-025900-1-a.json", f"artifacts/identity/{'b' * 32}/identity.json", "summary.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        make(tmp_path / name)
    write = (tmp_path / f"artifacts/identity/{'b' * 32}/{MANIFEST}").write_text
    write(json.dumps({"key": "x", "files": {}, "seconds": 1, "parts": {"inputs": {}}}))
    problems = take_inventory(config_of(f"workdir={tmp_path}", "stage=prune")).problems
    assert [problem in str(reported) for reported in problems] == [True] * 3
    with pytest.raises(UserError) as caught:
        show_status(config_of(f"workdir={tmp_path}", "stage=status"))
    assert [line in str(caught.value) for line in map(str, problems)] == [True] * 3
    assert "identity" in capsys.readouterr().out, "the readable part is shown"


def test_after_a_prune_everything_that_may_serve_still_can(copied: JudgedWork, capsys: pytest.CaptureFixture[str]) -> None:
    copied.command("stage=route", "routing.routes={copy: int8}")
    removable = removable_in(copied, "prune.keep_sweeps=1")
    copied.command("stage=prune", "prune.keep_sweeps=1", "prune.apply=true")
    assert not any(piece.path.exists() for piece in removable)
    assert broken(copied.artifacts) == []
    assert len(list(copied.artifacts.glob("baseline/[!.]*"))) == 1, "only the baseline of the last sweep is kept"
    assert len(list(copied.artifacts.glob("identity/[!.]*"))) == 3
    assert removable_in(copied, "prune.keep_sweeps=1") == []

    copied.command("stage=verify", f"bundle={identity_of(copied, 'fp8').parent}")
    copied.command("stage=route", "routing.routes={copy: int8}")
    copied.command("stage=rollback")
    assert copied.alias("champion") == "int8"
    with pytest.raises(UserError, match=r"the sweep has no candidate of this name, did you mean fp8k_int4v\?"):
        copied.command("stage=promote", "promote.name=fp8k_int4")
    copied.command("stage=promote", "promote.name=fp8k_int4v")
    assert copied.alias("champion") == "fp8k_int4v"
    with pytest.raises(GateRefusal, match="has no evidence"):
        copied.command("stage=promote", "promote.sweep=20260101-000000-1-a")
    copied.command("stage=status")
    assert "its evidence is not here" not in capsys.readouterr().out, "nothing that serves lacks its evidence"
    copied.command("stage=rollback")
    capsys.readouterr()
    copied.command("stage=status")
    output = capsys.readouterr().out
    assert "no previous champion" in output
    assert re.search(r"champion: serves since \S+@\S+ rolled version 4 \(fp8k_int4v\) back at 20\S+ \S+ UTC", output)
    assert all(len(version.tags) <= 6 for version in copied.store.read().versions.values())
