"""Files that are written whole, that several artifacts share, and those of the user's that come into a store.

Names that share an inode share what is written to it in place. Artifacts are never written to in place, so that those of one
store may share files; with a file outside of the store they never do: its owner may overwrite it, and with it the champion.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from pipeline.artifacts.digest import file_digest
from pipeline.core.records import in_threads

STORE_FILE = ".store.json"
"""At the root of a store: the version of its form."""
POOL = ".files"
"""Folder of a store with files that came from outside, by their sha256: one copy, however many artifacts link to it."""
UNUSED_S = 24 * 3600.0
"""Seconds after which a file of the pool that no artifact links to is removed."""


def link_or_copy(source: Path, target: Path) -> None:
    """Give `target` the bytes of `source`, once on disk where that is safe: a hard link within a store, else a copy.

    Linking fails between file systems, and for files of another user, which the kernel may protect.
    """
    source = source.resolve()  # Linux would link the symlink itself
    root = store_of(target.parent.resolve() / target.name)
    if root is None:
        shutil.copyfile(source, target)
        return
    shared = source if store_of(source) == root else _brought_in(root, source)
    try:
        os.link(shared, target)
    except OSError:
        shutil.copyfile(shared, target)


def link_or_copy_all(names: Iterable[str], source: Path, target: Path) -> None:
    """Give the directory `target` files of another one, as `link_or_copy` does, several at a time."""
    in_threads(lambda name: link_or_copy(source / name, target / name), names)


def write_whole(path: Path, text: str) -> None:
    """Write a file that others may read at any time: they find the old content or the new one, never a part."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def sweep_pool(root: Path) -> None:
    """Remove the files of a store's pool that no artifact has linked to for a day."""
    for path in (root / POOL).glob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if status.st_nlink == 1 and time.time() - status.st_ctime > UNUSED_S:
                path.unlink()


def store_of(path: Path) -> Path | None:
    return next((parent for parent in path.parents if (parent / STORE_FILE).is_file()), None)


def _brought_in(root: Path, source: Path) -> Path:
    """Return a store's own copy of a file that is outside of it; it is made once."""
    pool = root / POOL
    pool.mkdir(exist_ok=True)
    kept = pool / file_digest(source)
    if not kept.is_file() or file_digest(kept) != kept.name:
        scratch = pool / f"{kept.name}.{os.getpid()}.{threading.get_ident()}"
        try:
            shutil.copyfile(source, scratch)
            # Named by what was copied: the owner may write to the source meanwhile.
            kept = pool / file_digest(scratch)
            scratch.replace(kept)
        finally:
            scratch.unlink(missing_ok=True)
    return kept
