"""Sharing a file between artifacts: one inode where the file system allows it, the same bytes everywhere."""

import errno
import os
from pathlib import Path

import pytest

from pipeline.artifacts.files import link_or_copy


def test_a_link_shares_the_file_and_not_a_symlink_to_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("bytes")
    (tmp_path / "symlink").symlink_to("file")
    for source in ("file", "symlink"):
        link_or_copy(tmp_path / source, tmp_path / f"link_of_{source}")
        assert not (tmp_path / f"link_of_{source}").is_symlink()
        assert (tmp_path / f"link_of_{source}").samefile(tmp_path / "file")


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM])
def test_what_cannot_be_linked_is_copied(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "file").write_text("bytes")
    link_or_copy(tmp_path / "file", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "bytes"
    assert not (tmp_path / "copy").samefile(tmp_path / "file")


def test_a_missing_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        link_or_copy(tmp_path / "nothing", tmp_path / "copy")
