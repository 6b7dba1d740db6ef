"""The artifacts of a store as their manifests say them: what earlier runs made, from what, and what that took."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.artifacts.digest import files_digest
from pipeline.artifacts.store import MANIFEST, PEAK, Store


@dataclass(frozen=True)
class Made:
    """An artifact of an earlier run."""

    directory: Path
    parts: dict[str, Any]
    """What it was made from (`Recipe.parts`)."""
    files: dict[str, str]
    """Relative path -> sha256."""
    seconds: float
    """Time that making it took."""
    peak: int | None
    """Most resident memory of the process that made it, in bytes; None where that was not recorded."""
    at: float
    """When it was made, in seconds since 1970."""

    def digest_of(self, place: str) -> str:
        """Return the digest of a file or a folder of it; that of the whole for an empty name."""
        return self.files[place] if place in self.files else files_digest(self.files, place)

    @property
    def digests(self) -> set[str]:
        """The digests by which a later artifact may name it."""
        folders = {path.partition("/")[0] for path in self.files if "/" in path}
        return {files_digest(self.files), *self.files.values(), *(files_digest(self.files, folder) for folder in folders)}


class Past:
    """The artifacts of a store, read once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @cached_property
    def stages(self) -> dict[str, list[Made]]:
        """Every stage's artifacts, the oldest first."""
        root = self._store.root
        names = [path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."] if root.is_dir() else []
        return {stage: sorted(self._read(stage), key=lambda one: one.at) for stage in names}

    def _read(self, stage: str) -> list[Made]:
        return [
            Made(
                directory,
                manifest["parts"],
                manifest["files"],
                manifest["seconds"],
                manifest.get(PEAK),
                (directory / MANIFEST).stat().st_mtime,
            )
            for directory, manifest in self._store.manifests(stage)
            if all((directory / name).is_file() for name in manifest["files"])
        ]

    def of(self, stage: str) -> list[Made]:
        """Return the artifacts of a stage, the oldest first."""
        return self.stages.get(stage, [])

    def providers(self, digest: str) -> list[Made]:
        """Return the artifacts of which a digest is: of the whole, of a folder or of a file."""
        return self._by_digest.get(digest, [])

    @cached_property
    def _by_digest(self) -> dict[str, list[Made]]:
        found: dict[str, list[Made]] = defaultdict(list)
        for stage in self.stages.values():
            for made in stage:
                for digest in made.digests:
                    found[digest].append(made)
        return found
