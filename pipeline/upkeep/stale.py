"""What of a work directory is out of date: no command uses it as it is, or it lacks what it needs."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import NamedTuple

from pipeline.artifacts.digest import code_digest
from pipeline.checkpoint.places import locate_checkpoint
from pipeline.core.errors import REFUSALS
from pipeline.core.strict import StrictModel
from pipeline.upkeep.disk import Disk, Piece, distinct_bytes, is_being_made
from pipeline.upkeep.needs import Evidence, Needs
from pipeline.upkeep.registered import Registered


class Stale(StrictModel):
    """Something that is out of date."""

    what: str
    """`6 artifacts of build`."""
    why: str
    places: tuple[str, ...] = ()
    """Of the store, where they lie there."""
    size_bytes: int | None = None


class _Group(NamedTuple):
    stage: str
    why: str


def stale(disk: Disk, evidence: Evidence, registered: Registered, needs: Needs) -> list[Stale]:
    """Return what is out of date, the artifacts by stage and reason."""
    groups: dict[_Group, list[Piece]] = {}
    for piece in disk.artifacts.values():
        why = _other_source(piece)
        if why is not None:
            groups.setdefault(_Group(piece.kind, why), []).append(piece)
    found = [
        _stale(f"{len(pieces)} artifact{'s' if len(pieces) > 1 else ''} of {group.stage}", group.why, pieces)
        for group, pieces in sorted(groups.items())
    ]
    for who, what in needs.missing.items():
        found.append(
            Stale(what=who, why=f"{what} is not in this work directory: it lies in another one, or has to be judged again")
        )
    found += _without_evidence(evidence, registered)
    for (model, version), path in registered.checkpoints.items():
        if not _is_there(path):
            found.append(Stale(what=f"version {version} of {model}", why=f"its checkpoint {path} is no longer there"))
    for run in registered.left_running:
        found.append(Stale(what=f"run {run}", why="is RUNNING in MLflow, and its process died: the next command closes it"))
    unfinished = [piece for piece in disk.unfinished if not is_being_made(piece)]
    if unfinished:
        why = "was interrupted: the same command goes on from it, for thirty days"
        found.append(_stale(f"unfinished work of {len(unfinished)}", why, unfinished))
    scratch = [piece for piece in disk.scratch if not is_being_made(piece)]
    if scratch:
        found.append(
            _stale(f"scratch of {len(scratch)}", "its process died: the next command that makes something removes it", scratch)
        )
    return found


def _is_there(path: str) -> bool:
    try:
        return locate_checkpoint(path).exists()
    except REFUSALS:  # a package that is not installed
        return False


def _stale(what: str, why: str, pieces: Sequence[Piece]) -> Stale:
    return Stale(what=what, why=why, places=tuple(piece.place for piece in pieces), size_bytes=distinct_bytes(pieces))


def _without_evidence(evidence: Evidence, registered: Registered) -> Iterable[Stale]:
    """Yield the versions that cannot be promoted from here, a line a model."""
    for model in registered.models:
        gone = [number for number, version in model.versions.items() if version.identity_digest not in evidence.identities]
        if gone:
            named = ", ".join(sorted(gone, key=int))
            what = f"version{'s' if len(gone) > 1 else ''} {named} of {model.name}"
            yield Stale(what=what, why="no evidence in this work directory: nothing here can promote it")


def _other_source(piece: Piece) -> str | None:
    """Say which code or library an artifact was made by, where it is not today's: it is not used again."""
    code, libraries = piece.parts.get("code"), piece.parts.get("libraries")
    if not isinstance(code, Mapping) or not isinstance(libraries, Mapping):
        return "its manifest cannot be read: it is not used"
    other = sorted(str(module) for module, digest in code.items() if code_digest(str(module)) != digest)
    if other:
        return f"made by other code than today's ({', '.join(other)})"
    changed = [
        f"{name} {version}, here {_version(name)}" for name, version in sorted(libraries.items()) if _version(name) != version
    ]
    return f"made with {'; '.join(changed)}" if changed else None


@cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
