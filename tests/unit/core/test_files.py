"""A store's files are shared between its artifacts, but never with files that a user may modify in place."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.core import files
from stages.core.digest import file_digest, tree_entries
from stages.core.files import POOL, STORE_FILE, link_or_copy, sweep_pool, write_atomically


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "artifacts"
    for name in ("one", "two"):
        (root / "quantize" / name).mkdir(parents=True)
    (root / STORE_FILE).write_text("{}")
    return root


@pytest.fixture
def owned(tmp_path: Path) -> Path:
    """A file that belongs to the user."""
    path = tmp_path / "model.safetensors"
    path.write_text("weights")
    return path


def test_artifacts_share_the_file_and_not_a_symlink_to_it(store: Path) -> None:
    (store / "quantize" / "one" / "file").write_text("bytes")
    (store / "quantize" / "one" / "symlink").symlink_to("file")
    for source in ("file", "symlink"):
        target = store / "quantize" / "two" / source
        link_or_copy(store / "quantize" / "one" / source, target)
        assert not target.is_symlink()
        assert target.samefile(store / "quantize" / "one" / "file")


def test_an_owners_writes_reach_no_artifact(store: Path, owned: Path) -> None:
    first, two, three = (store / "quantize" / "one" / name for name in ("one", "two", "three"))
    link_or_copy(owned, first)
    link_or_copy(owned, two)
    assert first.samefile(two), "artifacts share one copy"
    with owned.open("r+") as stream:
        stream.write("garbage")
    assert first.read_text() == two.read_text() == "weights"
    (pooled,) = (store / POOL).iterdir()
    pooled.rename(store / POOL / file_digest(owned))  # damaged: its content does not have the digest in its name
    link_or_copy(owned, three)
    assert three.read_text() == "garbage"


def test_a_file_that_cannot_be_linked_is_copied(store: Path, owned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(owned, store / "quantize" / "one" / "w")
    link_or_copy(store / "quantize" / "one" / "w", store / "quantize" / "two" / "w")
    assert (store / "quantize" / "two" / "w").read_text() == "weights"


def test_copies_without_an_artifact_are_removed_after_a_day(store: Path, owned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = store / "quantize" / "one" / "w"
    link_or_copy(owned, target)
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 2 * files.UNLINKED_S)
    sweep_pool(store)
    assert len(list((store / POOL).iterdir())) == 1
    target.unlink()
    sweep_pool(store)
    assert list((store / POOL).iterdir()) == []


def test_a_file_replaces_another_users_file(tmp_path: Path) -> None:
    page, theirs = tmp_path / "report.html", tmp_path / "theirs.html"
    theirs.touch(0o444)
    page.hardlink_to(theirs)
    write_atomically(page, "PASS")
    assert (page.read_text(), theirs.read_text()) == ("PASS", "")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(page, "\ud800")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "theirs.html"]


def test_two_writers_with_one_process_id_do_not_interfere(store: Path, owned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers over one work directory: every writer has its own scratch file."""
    scratch: list[Path] = []

    def recording(function: Callable[..., object], position: int) -> Callable[..., object]:
        def call(*paths: Path) -> object:
            scratch.append(paths[position])
            return function(*paths)

        return call

    monkeypatch.setattr(shutil, "copyfile", recording(shutil.copyfile, 1))
    monkeypatch.setattr(Path, "replace", recording(Path.replace, 0))
    for name in ("one", "two"):
        write_atomically(store / "page.html", "PASS")
        link_or_copy(owned, store / "quantize" / name / "w")
        next((store / POOL).iterdir()).unlink()
    assert len(set(scratch)) == 4, "two pages, and two copies that are both written and renamed"


def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tree_entries(tmp_path / "missing", excluded="manifest.json")
