"""Artifacts: finished directories of the store, and the recipes that their keys are computed from."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from stages.core.digest import code_digest, files_digest, json_digest
from stages.core.errors import MissingRequirement
from stages.core.hardware import hardware

SCHEMA = 1
"""Version of manifests and recipes."""
SHOWING = ("planning", "report")
"""Folders of `stages` whose code changes no artifact."""
EVALUATING = ("evaluate", "verdict")
"""Folders of `stages` whose code changes only the artifacts of evaluations."""


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A finished directory of the store. `digest` covers all of its files."""

    exists: ClassVar[bool] = True
    """False for a dry run's placeholder, whose files do not exist yet."""
    path: Path
    stage: str
    key: str
    digest: str
    files: dict[str, str]
    parts: dict[str, object]
    """The values whose digest is the key (`Recipe.parts`)."""
    reused: bool = False
    seconds: float = 0.0
    """Seconds that making the artifact took, also if this command only reused it."""

    def digest_under(self, folder: str) -> str:
        return files_digest(self.files, folder)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of an artifact. Raises MissingRequirement for a library that is not installed."""

    stage: str
    config: Mapping[str, object]
    inputs: Mapping[str, str]
    libraries: tuple[str, ...] = ()
    evaluates: bool = False
    """Whether it measures an engine, so that the key contains the hardware and the code of evaluations."""
    parts: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        parts: dict[str, object] = {
            "schema": SCHEMA,
            "stage": self.stage,
            "config": dict(self.config),
            "inputs": dict(self.inputs),
            "code": code_digest(*SHOWING) if self.evaluates else code_digest(*SHOWING, *EVALUATING),
            "libraries": {name: _version(name) for name in self.libraries},
            "hardware": hardware() if self.evaluates else platform.machine(),
        }
        object.__setattr__(self, "parts", parts)

    @cached_property
    def key(self) -> str:
        return json_digest(self.parts)

    @staticmethod
    def place(stage: str, key: str) -> str:
        """Return an artifact's directory, relative to the store's root."""
        return f"{stage}/{key[:32]}"


@cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise MissingRequirement(f"{name} is not installed: pip install {name}") from error
