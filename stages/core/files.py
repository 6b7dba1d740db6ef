"""Files that are written atomically, shared by several artifacts, or copied into a store.

All hard links to a file change when it is written in place. Artifacts are never written in place, so artifacts of one store
may share files. They are never linked to a file outside the store, because its owner might overwrite the file, which would
change the served model.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from secrets import token_hex

from stages.core.digest import file_digest
from stages.core.threads import in_threads

ARTIFACTS = "artifacts"
"""Folder of a work directory with its store of artifacts."""
STORE_FILE = ".store.json"
"""File at the root of a store with the version of the store's layout."""
POOL = ".files"
"""Folder of a store with copies of files from outside, named by their sha256. Any number of artifacts link to one copy."""
UNLINKED_S = 24 * 3600.0
"""Seconds until an unlinked file of the pool is removed."""


def link_or_copy(source: Path, target: Path) -> None:
    """Create `target` with the bytes of `source`: a hard link within a store, a copy elsewhere.

    A source outside the store is copied into the store's pool once, and linked from there. If linking fails (for example
    between file systems, or for another user's file that the kernel protects), the file is copied.
    """
    source = source.resolve()  # Linux would link the symlink itself
    root = store_of(target.parent.resolve() / target.name)
    if root is None:
        shutil.copyfile(source, target)
        return
    shared = source if store_of(source) == root else _pooled_copy(root, source)
    try:
        os.link(shared, target)
    except OSError:
        shutil.copyfile(shared, target)


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


def sweep_pool(root: Path) -> None:
    """Remove the files of a store's pool that no artifact has linked to for a day."""
    for path in (root / POOL).glob("*"):
        with contextlib.suppress(OSError):  # removed by another process, or another user's
            status = path.stat()
            if status.st_nlink == 1 and time.time() - status.st_ctime > UNLINKED_S:
                path.unlink()


def store_of(path: Path) -> Path | None:
    return next((parent for parent in path.parents if (parent / STORE_FILE).is_file()), None)


def _pooled_copy(root: Path, source: Path) -> Path:
    """Return the store's copy of a file from outside; the copy is made once."""
    pool = root / POOL
    pool.mkdir(exist_ok=True)
    pooled = pool / file_digest(source)
    if not pooled.is_file() or file_digest(pooled) != pooled.name:
        scratch = pool / f"{pooled.name}.{token_hex(8)}"
        try:
            shutil.copyfile(source, scratch)
            # The copy is hashed, because the owner may write to the source meanwhile.
            pooled = pool / file_digest(scratch)
            scratch.replace(pooled)
        finally:
            scratch.unlink(missing_ok=True)
    return pooled
