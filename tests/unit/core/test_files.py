"""A store's files are shared between its artifacts, but never with files that a user may modify in place."""

import errno
import os
from pathlib import Path

import pytest

from stages.core.digest import tree_entries
from stages.core.files import STORE_FILE, link_or_copy, write_atomically


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
    copy = store / "quantize" / "one" / "weights"
    link_or_copy(owned, copy)
    with owned.open("r+") as stream:
        stream.write("garbage")
    assert copy.read_text() == "weights"


def test_a_file_that_cannot_be_linked_is_copied(store: Path, owned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(owned, store / "quantize" / "one" / "w")
    link_or_copy(store / "quantize" / "one" / "w", store / "quantize" / "two" / "w")
    assert (store / "quantize" / "two" / "w").read_text() == "weights"


def test_a_file_replaces_another_users_file(tmp_path: Path) -> None:
    page, theirs = tmp_path / "report.html", tmp_path / "theirs.html"
    theirs.touch(0o444)
    page.hardlink_to(theirs)
    write_atomically(page, "PASS")
    assert (page.read_text(), theirs.read_text()) == ("PASS", "")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(page, "\ud800")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "theirs.html"]


def test_two_writers_with_one_process_id_do_not_interfere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers over one work directory: every writer has a scratch file of its own."""
    scratch, replace = list[Path](), Path.replace

    def recording(path: Path, target: Path) -> Path:
        scratch.append(path)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", recording)
    for _ in range(2):
        write_atomically(tmp_path / "page.html", "PASS")
    assert len(set(scratch)) == 2


def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tree_entries(tmp_path / "missing", excluded="manifest.json")
