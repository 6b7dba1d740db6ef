"""The artifact store: content-addressed directories, made once, verified when used again.

An artifact's key covers its stage, the config the stage uses, the digests of its inputs, the code, the library versions
and the hardware. It is made in a temporary directory, its manifest is written last, and a rename makes it visible: what
was interrupted never looks finished, and a failure is never cached.
"""

import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.artifacts.digest import code_digest, files_digest, json_digest, tree_files
from pipeline.artifacts.hardware import hardware
from pipeline.core.errors import MissingRequirement

MANIFEST = ".manifest.json"
SCHEMA = 1


@dataclass(frozen=True)
class Artifact:
    """A finished directory of the store. `digest` covers every file in it."""

    path: Path
    stage: str
    key: str
    digest: str
    files: dict[str, str]
    """Relative path -> sha256."""
    parts: dict[str, object]
    """What its key was made from."""
    reused: bool
    seconds: float
    """What it took to make, also when it was reused."""

    def digest_under(self, folder: str) -> str:
        """Digest of the files below `folder` only."""
        return files_digest(self.files, folder)


@dataclass(frozen=True)
class Recipe:
    """What decides the bytes of an artifact. Raises MissingRequirement for a library that is not installed."""

    stage: str
    code: tuple[str, ...]
    """Modules whose source, with all they import from this project, is part of the key."""
    config: Mapping[str, object]
    inputs: Mapping[str, str]
    """Name -> digest."""
    libraries: tuple[str, ...] = ()
    """Distributions whose versions are part of the key."""
    measures_time: bool = False
    """Whether the hardware's identity is part of the key."""
    parts: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        parts: dict[str, object] = {
            "schema": SCHEMA,
            "stage": self.stage,
            "config": dict(self.config),
            "inputs": dict(self.inputs),
            "code": {module: code_digest(module) for module in self.code},
            "libraries": {name: _version(name) for name in self.libraries},
            "hardware": hardware() if self.measures_time else platform.machine(),
        }
        object.__setattr__(self, "parts", parts)

    @property
    def key(self) -> str:
        return json_digest(self.parts)

    @staticmethod
    def place(stage: str, key: str) -> str:
        """Where the artifact of a key lies below a store's root."""
        return f"{stage}/{key[:32]}"


class Store:
    """Artifacts under one root directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, recipe: Recipe) -> Path:
        return self.root / recipe.place(recipe.stage, recipe.key)

    def get(self, recipe: Recipe, make: Callable[[Path], None]) -> Artifact:
        """The artifact of `recipe`: verified and reused when it exists, else made by `make(empty directory)`."""
        target = self.path(recipe)
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            found = self._verified(target, recipe)
            if found is not None:
                return found
            started = time.monotonic()
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            try:
                make(scratch)
                self._seal(scratch, recipe, time.monotonic() - started)
                if target.exists():  # it failed its verification
                    shutil.rmtree(target)
                scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        made = self._verified(target, recipe, reused=False)
        assert made is not None, f"{target} changed while it was being sealed"
        return made

    def made_from(self, stage: str, name: str, digest: str) -> list[Path]:
        """Directories of a stage's intact artifacts whose input `name` had this digest, the oldest first."""
        found = []
        for path in (self.root / stage).glob(f"[!.]*/{MANIFEST}"):  # hidden ones are being made
            manifest = _manifest(path.parent)
            if manifest is None or manifest["parts"]["inputs"].get(name) != digest:
                continue
            if tree_files(path.parent) == manifest["files"]:
                found.append((path.stat().st_mtime, path.parent))
        return [directory for _, directory in sorted(found)]

    def _seal(self, scratch: Path, recipe: Recipe, seconds: float) -> None:
        files = tree_files(scratch)
        manifest = {"key": recipe.key, "parts": recipe.parts, "files": files, "seconds": seconds}
        scratch.chmod(0o755)  # mkdtemp makes it private to this user
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")

    def _verified(self, target: Path, recipe: Recipe, reused: bool = True) -> Artifact | None:
        """The artifact at `target` if its manifest has this very key and every file still has its digest."""
        manifest = _manifest(target)
        if manifest is None or manifest["key"] != recipe.key or tree_files(target) != manifest["files"]:
            return None
        files = manifest["files"]
        return Artifact(
            target, recipe.stage, recipe.key, files_digest(files), files, manifest["parts"], reused, manifest["seconds"]
        )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise MissingRequirement(f"{name} is not installed: pip install {name}") from error


def _manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of an artifact; None where it is not there, cannot be read, or is none: then the artifact is not used."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        complete = isinstance(manifest["parts"]["inputs"], dict) and {"key", "files", "seconds"} <= manifest.keys()
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return manifest if complete else None
