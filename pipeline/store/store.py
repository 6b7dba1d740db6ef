"""The artifact store: content-addressed directories that are made once and verified at every reuse.

An artifact's key covers its stage, the config that the stage uses, the digests of its inputs, the code, the library versions
and the hardware. An artifact is made in a temporary directory, its manifest is written last, and a rename makes it visible.
So an interrupted artifact never looks finished, and a failure is never cached. Only long work that runs sample by sample is
resumable: its directory `.partial/STAGE/KEY` is kept, and the next attempt with this key continues in this directory. Other
unfinished work has a dot before its key.

A store contains no paths to itself, so it may be moved with its work directory. `.store.json` holds the version of its layout.
Leftovers of dead processes are removed when the store is next written to. A living process holds the lock of its artifact.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar

from pipeline.store.locks import locked, locked_at_once, shared
from stages.core.artifact import Artifact, Recipe
from stages.core.digest import files_digest, json_digest, tree_files
from stages.core.errors import UserError
from stages.core.files import STORE_FILE, sweep_pool, write_atomically
from stages.core.strict import Unreadable, parse_json, read_file

MANIFEST = ".manifest.json"
LAYOUT = '{"schema_version": 1}\n'
"""Content of STORE_FILE, which names the layout of the store and its manifests. A store without the file has this layout."""
PARTIAL = ".partial"
"""Folder of a store with unfinished artifacts: `STAGE/KEY` if they are resumable, otherwise `STAGE/.KEY-RANDOM`."""
IN_USE = ".in_use"
"""Lock file at the root of a store. Commands that use artifacts hold it together, and a removal of artifacts holds it alone."""
MAX_BYTES = 64 << 20
"""Maximum size of a manifest."""
RESUMABLE_S = 30 * 24 * 3600.0
"""Seconds without a write before an unfinished artifact counts as abandoned."""


class Store:
    makes: ClassVar[bool] = True
    """False for a dry run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prepared = False

    def path(self, recipe: Recipe) -> Path:
        return self.root / recipe.place(recipe.stage, recipe.key)

    def make(self, recipe: Recipe, build: Callable[[Path], object], *, resumable: bool = False) -> Artifact:
        """Return the artifact of a recipe. If it is missing, `build` fills an empty directory, under the artifact's lock.

        If `build` raises, the directory is removed. With `resumable` the directory is kept, and the next `build` may find files
        of an earlier attempt: it must trust only files that it can check, and remove files that do not belong to the artifact.
        """
        self._prepare()
        target = self.path(recipe)
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock_of(target), f"the artifact {recipe.place(recipe.stage, recipe.key)}"):
            existing = self.verified(recipe)
            if existing is not None:
                return existing
            started = time.monotonic()
            scratch = unfinished(self.root, recipe.stage, recipe.key, resumable=resumable)
            scratch.mkdir(parents=True, exist_ok=True)
            try:
                build(scratch)
                seconds = time.monotonic() - started
                manifest = {"key": recipe.key, "parts": recipe.parts, "files": tree_files(scratch), "seconds": seconds}
                (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
                if target.exists():  # it failed its verification
                    shutil.rmtree(target)
                scratch.rename(target)
            finally:
                if not resumable:
                    shutil.rmtree(scratch, ignore_errors=True)
        made = self.verified(recipe, reused=False)
        if made is None:
            raise UserError(f"{scratch}: was changed while this command finished it; run the command again")
        return made

    @contextmanager
    def scratch(self, stage: str, key: str) -> Iterator[Path]:
        """Yield an empty directory and remove it after the block; after a kill, the next use of the store removes it."""
        self._prepare()
        lock = lock_of(self.root / Recipe.place(stage, key))
        lock.parent.mkdir(parents=True, exist_ok=True)
        directory = unfinished(self.root, stage, key, resumable=False)
        with used(self.root), shared(lock, f"leftovers in {directory.parent}, which are being removed"):
            directory.mkdir(parents=True)
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)

    def _prepare(self) -> None:
        """Make the store or check its version, and remove leftovers of dead processes; once per `Store`."""
        if self._prepared:
            return
        check_store(self.root)
        marker = self.root / STORE_FILE
        if not marker.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            write_atomically(marker, LAYOUT)
        self._sweep()
        self._prepared = True

    def _sweep(self) -> None:
        for scratch in (self.root / PARTIAL).glob("*/*"):
            target = self.root / Recipe.place(scratch.parent.name, scratch.name.removeprefix("."))
            with suppress(OSError):  # another process may sweep too
                touched = max(path.lstat().st_mtime for path in (scratch, *scratch.rglob("*")))
                if scratch.name.startswith(".") or target.is_dir() or time.time() - touched > RESUMABLE_S:
                    with locked_at_once(lock_of(target)) as abandoned:
                        if abandoned:
                            shutil.rmtree(scratch, ignore_errors=True)
        sweep_pool(self.root)

    def verified(self, recipe: Recipe, *, reused: bool = True) -> Artifact | None:
        """Return the artifact, marked as `reused`; None if its manifest has another key or a file differs from its digest."""
        target = self.path(recipe)
        manifest = read_manifest(target)
        if manifest is None or not manifest["key"] == json_digest(manifest["parts"]) == recipe.key:
            return None
        if tree_files(target) != manifest["files"]:
            return None
        files = manifest["files"]
        return Artifact(
            path=target,
            stage=recipe.stage,
            key=recipe.key,
            digest=files_digest(files),
            files=files,
            parts=manifest["parts"],
            reused=reused,
            seconds=manifest["seconds"],
        )


@contextmanager
def used(root: Path) -> Iterator[None]:
    """Prevent the removal of a store's artifacts while the block runs; waits for a removal in progress.

    A store that is missing, or read-only for this user, is not protected.
    """
    if os.access(root, os.W_OK):
        with shared(root / IN_USE, f"the artifacts in {root}, some of which are being removed"):
            yield
    else:
        yield


def check_store(root: Path) -> None:
    """Raise UserError for a store with another layout."""
    path = root / STORE_FILE
    try:
        if read_file(path, MAX_BYTES).decode(errors="replace") == LAYOUT:
            return
    except Unreadable:
        if not os.path.lexists(path):
            return
    raise UserError(f"{path}: the store is of another version of kvgate, or damaged; use that version, or give another workdir")


def lock_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")


def unfinished(root: Path, stage: str, key: str, *, resumable: bool) -> Path:
    """Return the directory in which an artifact is made. Unless `resumable`, the name is new in every call.

    With a fixed name, the child process of a killed command might still write into the directory of the next attempt.
    """
    return root / PARTIAL / stage / (key if resumable else f".{key}-{token_hex(8)}")


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return an artifact's manifest, or None if it is missing or unreadable; such an artifact is not used."""
    try:
        manifest = parse_json(read_file(directory / MANIFEST, MAX_BYTES))
        complete = isinstance(manifest["parts"]["inputs"], dict) and isinstance(manifest["files"], dict)
        complete = complete and {"key", "seconds"} <= manifest.keys()
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return manifest if complete else None
