"""The artifact store: incomplete artifacts are never found, altered ones never reused, and waits for locks end."""

import errno
import fcntl
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pipeline.store import locks
from pipeline.store.locks import locked, locked_at_once
from pipeline.store.store import IN_USE, MANIFEST, PARTIAL, Store, lock_of, read_manifest, used
from pipeline.store.workdir import check_workdir
from stages.core import digest
from stages.core.artifact import Recipe
from stages.core.errors import MissingRequirement, UserError
from stages.core.files import STORE_FILE


def recipe(**config: object) -> Recipe:
    return Recipe("demo", config=config, inputs={"model": "0" * 64}, libraries=("numpy",))


def write_one(out: Path) -> None:
    (out / "sub").mkdir()
    (out / "sub" / "one.txt").write_text("one")


@pytest.mark.parametrize(
    "other",
    [{"config": {"a": 2}}, {"inputs": {"model": "1" * 64}}, {"stage": "other"}, {"libraries": ("rich",)}, {"evaluates": True}],
    ids=lambda other: next(iter(other)),
)
def test_whatever_can_change_the_bytes_changes_the_key(other: dict[str, Any]) -> None:
    assert replace(recipe(a=1), **other).key != recipe(a=1).key


@pytest.mark.parametrize(
    "alter",
    [
        lambda path: (path / "sub" / "one.txt").write_text("two"),
        lambda path: (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"a": 1', '"a": 3')),
        lambda path: (path / MANIFEST).unlink(),
    ],
    ids=["a file", "the manifest's parts", "no manifest"],
)
def test_what_was_altered_is_noticed_and_made_again(tmp_path: Path, alter: Callable[[Path], object]) -> None:
    store = Store(tmp_path)
    alter(store.make(recipe(a=1), write_one).path)
    again = store.make(recipe(a=1), write_one)
    assert not again.reused
    assert (again.path / "sub" / "one.txt").read_text() == "one"


def test_an_artifact_that_changes_while_sealed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def altered(path: Path, target: Path) -> Path:
        (path / "sub" / "one.txt").write_text("two")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", altered)
    with pytest.raises(UserError, match="was changed while this command finished it; run the command again"):
        Store(tmp_path).make(recipe(), write_one)
    monkeypatch.undo()
    assert not Store(tmp_path).make(recipe(), write_one).reused


def test_a_failure_leaves_nothing_and_is_not_cached(tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        write_one(out)
        raise RuntimeError("disk on fire")

    store = Store(tmp_path)
    with pytest.raises(RuntimeError, match="disk on fire"):
        store.make(recipe(), fail)
    assert [path for path in tmp_path.glob("**/demo/*") if path.is_dir()] == []
    assert not store.make(recipe(), write_one).reused


def test_a_resumable_artifact_continues_from_its_own_recipe(tmp_path: Path) -> None:
    found: list[list[str]] = []

    def fill(out: Path) -> None:
        found.append(sorted(path.name for path in out.iterdir()))
        (out / f"part{len(found)}").write_text("x")
        if len(found) < 3:
            raise KeyboardInterrupt

    store = Store(tmp_path)
    for a in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            store.make(recipe(a=a), fill, resumable=True)
    assert not store.path(recipe(a=1)).exists()
    made = store.make(recipe(a=1), fill, resumable=True)
    assert found == [[], [], ["part1"]]
    assert sorted(made.files) == ["part1", "part3"]
    assert [path.name for path in (tmp_path / ".partial" / "demo").iterdir()] == [recipe(a=2).key]
    assert store.make(recipe(a=1), fill, resumable=True).reused


def test_only_scratch_of_dead_processes_is_removed(tmp_path: Path) -> None:
    Store(tmp_path).make(recipe(a=1), write_one)
    keys = {a: recipe(a=a).key for a in (1, 2, 3)}
    for key in keys.values():
        for name in (key, f".{key}"):
            (tmp_path / PARTIAL / "demo" / name).mkdir(parents=True)
            (tmp_path / PARTIAL / "demo" / name / "half").write_text("x")
    with locked_at_once(lock_of(Store(tmp_path).path(recipe(a=2)))) as held:
        assert held
        Store(tmp_path).make(recipe(a=4), write_one)
    # A resumable scratch folder stays; a finished artifact needs none.
    assert {path.name for path in (tmp_path / PARTIAL / "demo").iterdir()} == {keys[2], f".{keys[2]}", keys[3]}
    artifact = Store(tmp_path).make(recipe(a=2), write_one)
    assert sorted(artifact.files) == ["sub/one.txt"], "made in an empty directory"


def test_a_used_store_is_locked_so_that_other_users_can_lock_it_too(tmp_path: Path) -> None:
    root, before = tmp_path / "store", os.umask(0o077)
    root.mkdir()
    try:
        with used(root), used(root):
            assert (root / IN_USE).stat().st_mode & 0o777 == 0o666
            with locked_at_once(root / IN_USE) as unused:
                assert not unused
    finally:
        os.umask(before)
    with locked_at_once(root / IN_USE) as unused:
        assert unused
    with used(tmp_path / "nothing"):
        assert not (tmp_path / "nothing").exists()


def test_a_moved_store_is_reused_as_it_is(tmp_path: Path) -> None:
    Store(tmp_path / "here").make(recipe(), write_one)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = Store(tmp_path / "there").make(recipe(), write_one)
    assert moved.reused
    assert str(tmp_path) not in (moved.path / MANIFEST).read_text()


@pytest.mark.parametrize("content", ['{"schema_version": 2}', "[]", "\udcff"])
def test_a_store_of_another_form_is_refused_with_a_line(content: str, tmp_path: Path) -> None:
    (tmp_path / STORE_FILE).write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match="the store is of another version of kvgate, or damaged; use that version"):
        Store(tmp_path).make(recipe(), write_one)
    assert [path.name for path in tmp_path.iterdir()] == [STORE_FILE]


@pytest.mark.parametrize("text", ["{", "[]", '{"parts": {"inputs": {}}}', "\udcff"])
def test_a_manifest_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text, errors="surrogateescape")
    assert read_manifest(tmp_path) is None


def test_a_folders_digest_ignores_siblings_and_nan_has_none(tmp_path: Path) -> None:
    def with_sibling(out: Path) -> None:
        write_one(out)
        (out / "else.txt").write_text("x")

    store = Store(tmp_path)
    plain, more = store.make(recipe(a=1), write_one), store.make(recipe(a=2), with_sibling)
    assert plain.digest != more.digest
    assert plain.digest_under("sub") == more.digest_under("sub")
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest.json_digest({"a": float("nan")})


CODE = """
# A comment.
def scaled(value: float) -> float:
    \"\"\"Return twice the value.\"\"\"
    assert value >= 0
    return value * 2.0 if value in {"one", "two", "three"} else 0.0
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("# A comment.", "# Another one,\n# of two lines.", True),
        ("Return twice the value.", "Double the value.", True),
        ('    """Return twice the value."""\n', "", True),
        ("    assert value >= 0\n", "", False),
        ("assert value >= 0", "assert value > 0", False),
        ("2.0", "2", False),
        ("0.0", "-0.0", False),
        ('"two"', '"four"', False),
        ("value *", "value +", False),
        ("scaled", "doubled", False),
    ],
)
def test_only_what_code_does_is_part_of_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, same: bool
) -> None:
    digests = []
    for number, text in enumerate((CODE, CODE.replace(old, new))):
        source = tmp_path / str(number) / "stages" / "engines" / "worker" / "script.py"
        source.parent.mkdir(parents=True)
        source.write_text(text)
        monkeypatch.setattr(digest, "ROOT", tmp_path / str(number))
        digests += [digest.code_digest.__wrapped__(), digest.code_digest.__wrapped__("engines")]
    assert (digests[0] == digests[2]) is same
    assert digests[1] == digests[3]


@pytest.mark.parametrize(
    ("folder", "evaluates", "same"),
    [
        ("plugins/kernels", False, False),
        ("stages/engines", False, False),
        ("stages/evaluate", True, False),
        ("stages/evaluate", False, True),
        ("stages/report", True, True),
    ],
)
def test_code_that_can_change_an_artifact_is_part_of_its_key(
    folder: str, evaluates: bool, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "ROOT", tmp_path)
    monkeypatch.setattr("stages.core.artifact.code_digest", digest.code_digest.__wrapped__)
    before = replace(recipe(), evaluates=evaluates).key
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "module.py").write_text("x = 1")
    assert (replace(recipe(), evaluates=evaluates).key == before) is same


REFUSAL = r"cannot be locked \(.*\); it must be in a folder that has locks and lets you write"
FORK = multiprocessing.get_context("fork")


def _hold(path: Path, ready: Connection) -> None:
    with locked(path, "a test"):
        ready.send("held")
        signal.pause()


def test_a_wait_says_its_reason_and_ends_with_limit_or_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / ".lock"
    parent, child = FORK.Pipe()
    process = FORK.Process(target=_hold, args=(path, child), daemon=True)
    process.start()
    assert parent.recv() == "held"
    with locked_at_once(path) as mine:
        assert not mine
    monkeypatch.setattr(locks, "QUIET_S", 0.05)
    monkeypatch.setattr(locks, "LIMIT_S", 0.2)
    message = rf"registering: another process held {path} for \S+ hours; find it with `fuser {path}`"
    with pytest.raises(MissingRequirement, match=message), locked(path, "registering"):
        pass
    assert caplog.messages[0].startswith(f"waiting for registering: another process holds {path}; at most ")
    process.kill()
    process.join()
    with locked_at_once(path) as mine:
        assert mine


def _download(root: Path, ready: Connection) -> None:
    with Store(root).scratch("download", "a" * 64) as directory:
        (directory / "weights.bin").touch()
        ready.send(directory)
        signal.pause()


def test_a_scratch_directory_is_removed_once_its_process_is_dead(tmp_path: Path) -> None:
    parent, child = FORK.Pipe()
    process = FORK.Process(target=_download, args=(tmp_path, child), daemon=True)
    process.start()
    directory = parent.recv()
    with Store(tmp_path).scratch("download", "a" * 64) as own:
        assert (own.is_dir(), directory.is_dir(), own != directory) == (True, True, True), "both download at once"
    assert not own.exists()
    process.kill()
    process.join()
    with Store(tmp_path).scratch("download", "b" * 64):
        assert not directory.exists()


@pytest.mark.parametrize("place", ["file/.lock", "folder", ".lock"])
def test_a_place_without_locks_is_refused_and_not_waited_for(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    if place == ".lock":  # a file system without locks
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(UserError, match=f"{tmp_path / place}: {REFUSAL}"), locked(tmp_path / place, "summary.json"):
        pass
    if place == ".lock":
        with pytest.raises(UserError, match=REFUSAL), locked_at_once(tmp_path / place):
            pass


def test_a_work_directory_whose_absolute_path_is_too_long_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / "/".join(["x" * 200] * 20)
    with pytest.raises(UserError, match=rf"^workdir=x: its absolute path has {len(str(deep)):,} bytes, which is too long"):
        check_workdir(deep, "x")
