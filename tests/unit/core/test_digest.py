"""Digests and listings of directories."""

from pathlib import Path

import pytest

from stages.core.digest import tree_entries


def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tree_entries(tmp_path / "missing", but="manifest.json")
