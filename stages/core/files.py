"""Files that are written atomically, shared by several artifacts, or copied into a store.

All hard links to a file change when it is written in place. Artifacts are never written in place, so artifacts of one store
may share files. They are never linked to a file outside the store, because its owner might overwrite the file, which would
change the served model.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from secrets import token_hex

from stages.core.threads import in_threads

ARTIFACTS = "artifacts"
"""Folder of a work directory with its store of artifacts."""
STORE_FILE = ".store.json"
"""File at the root of a store with the version of the store's layout."""


def link_or_copy(source: Path, target: Path) -> None:
    """Create `target` with the bytes of `source`: a hard link within a store, a copy elsewhere.

    If linking fails (for example between file systems, or for another user's file that the kernel protects), the file is
    copied.
    """
    source = source.resolve()  # Linux would link the symlink itself
    root = store_of(target.parent.resolve() / target.name)
    if root is not None and store_of(source) == root:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def link_or_copy_all(names: Iterable[str], source: Path, target: Path) -> None:
    """Link or copy files from `source` into the directory `target` in parallel, as `link_or_copy` does."""
    in_threads(lambda name: link_or_copy(source / name, target / name), names)


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: concurrent readers find the old content or the new content, never a part."""
    scratch = path.with_name(f".{path.name}.{token_hex(8)}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def store_of(path: Path) -> Path | None:
    return next((parent for parent in path.parents if (parent / STORE_FILE).is_file()), None)
