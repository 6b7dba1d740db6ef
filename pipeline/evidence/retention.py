"""Finds the artifacts of a store that are needed: by engines that serve or may serve again, and by recent candidates.

`walk` lists the artifacts in a store, with their bytes. Artifacts share files by hard links. Unfinished work is not listed: the
store itself removes leftovers, and keeps the samples of an interrupted evaluation for thirty days.

A version or a candidate needs the artifacts of the identity that it cites. The identity names every artifact of its chain:

| needed by | artifacts that stay |
|---|---|
| champion, previous, routes | both engines, the report and the identity, which a replay, a promotion and a rollback read |
| candidates of the last sweeps | the whole chain, because the next evaluation may reuse builds and measurements |
| unfinished sweeps among the last sweeps | every artifact made since the first unfinished one began: no identity names it yet |

Single evaluations are counted separately from sweeps, with the same limit, so that a few of them never outdate a large sweep.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.config import Config
from pipeline.evidence.identity import IDENTITY_FILE, Lineage, read_lineage
from pipeline.registry import summary
from pipeline.registry.summary import Summary
from pipeline.registry.tracking import Location, RegisteredModel, locate
from pipeline.store.store import MANIFEST, read_manifest
from stages.core.digest import file_digest, files_digest
from stages.core.errors import Refusal, UserError, describe


@dataclass(frozen=True)
class Piece:
    """An artifact in a store, which is removed or kept as a whole."""

    place: str
    """Path relative to the store's root: `build/0bbee01def1948b5e69ef32590a029cc`."""
    kind: str
    """Stage that made it."""
    path: Path
    files: Mapping[tuple[int, int], int]
    """(device, inode) of every file -> its bytes. Hard links share an inode."""
    made: float
    """Time when it was finished, in seconds since 1970."""


def walk(root: Path) -> list[Piece]:
    """Return every artifact of a store; empty if the store does not exist. Nothing is written."""
    pieces = []
    for manifest in sorted(root.glob(f"[!.]*/*/{MANIFEST}")):
        path = manifest.parent
        if not manifest.is_file() or path.is_symlink():
            continue
        with suppress(FileNotFoundError):  # another command removed it
            stats = [file.lstat() for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
            files = {(about.st_dev, about.st_ino): about.st_size for about in stats}
            pieces.append(Piece(path.relative_to(root).as_posix(), path.parent.name, path, files, manifest.stat().st_mtime))
    return pieces


def distinct_bytes(pieces: Iterable[Piece]) -> int:
    """Return the bytes of pieces. A shared file counts once."""
    return sum({file: size for piece in pieces for file, size in piece.files.items()}.values())


REGISTERED_LAST = "candidate"
"""Alias that does not serve: it points at the last registered version that did not fail."""


@dataclass
class Inventory:
    """Contents of a work directory and its tracking store."""

    pieces: list[Piece]
    identities: dict[str, tuple[str, Lineage]] = field(default_factory=dict)
    """sha256 of an identity.json -> place of its artifact, and its content."""
    location: Location | None = None
    """The tracking store; None if tracking is off, or the store is missing or could not be read."""
    models: list[RegisteredModel] = field(default_factory=list)
    sweeps: list[Summary] = field(default_factory=list)
    """Sweeps, the latest first."""
    problems: list[Refusal] = field(default_factory=list)
    """UserError or MissingRequirement for everything that could not be read."""

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        try:
            yield
        except Refusal as error:
            self.problems.append(error)
        except OSError as error:
            self.problems.append(UserError(describe(error)))


def take_inventory(config: Config) -> Inventory:
    """Read a work directory and the tracking store. Opening a moved store corrects its addresses; nothing else is written."""
    inventory, last = Inventory(walk(config.artifacts)), ""
    for piece in inventory.pieces:
        if piece.kind == "identity":
            with inventory.noting_problems():
                lineage = read_lineage(piece.path / IDENTITY_FILE)
                inventory.identities[file_digest(piece.path / IDENTITY_FILE)] = piece.place, lineage
    for sweep in summary.sweeps(config.work):
        with inventory.noting_problems():
            inventory.sweeps.append(summary.load(config.work, sweep))
    with inventory.noting_problems():
        if config.tracking.enabled:
            location = locate(config.tracking, config.work, config.model.label)
            if location.exists:
                from pipeline.registry.mlflow_store import RegistryReader  # importing MLflow takes 2 s

                inventory.models = RegistryReader(location).registered(inventory.identities)
            inventory.location = location
    with inventory.noting_problems():
        last = summary.load(config.work).sweep  # a clock may have been set back between sweeps
    inventory.sweeps.sort(key=lambda sweep: (sweep.sweep == last, sweep.began, sweep.sweep), reverse=True)
    return inventory


def last_sweeps(sweeps: Iterable[Summary], number: int) -> list[Summary]:
    """Return the first `number` sweeps and the first `number` single evaluations of `sweeps`, which starts with the latest.

    Sweeps without a candidate are returned too, but do not count towards `number`.
    """
    counts = Counter[bool]()
    chosen = []
    for sweep in sweeps:
        if counts[sweep.single] < number:
            chosen.append(sweep)
            counts[sweep.single] += bool(sweep.candidates)
    return chosen


def needed_places(inventory: Inventory, keep_sweeps: int) -> set[str]:
    """Return the places of the pieces that must stay.

    A serving engine is also found by its digest, so it stays even if its identity was altered, removed or made in another work
    directory. `keep_sweeps`: how many of the last sweeps, and of the last single evaluations, keep their artifacts.
    """
    needed = set[str]()

    def keep(digest: str, *, whole_chain: bool = False) -> None:
        if digest in inventory.identities:
            place, lineage = inventory.identities[digest]
            links = lineage.chain if whole_chain else lineage.reads
            needed.update([place, *(link.place for link in links)])

    builds = defaultdict[str | None, list[str]](list)
    for piece in inventory.pieces:
        if piece.kind == "build" and (manifest := read_manifest(piece.path)) is not None:
            builds[files_digest(manifest["files"])].append(piece.place)
    for model in inventory.models:
        for alias, version in model.pointed_at.items():
            if alias != REGISTERED_LAST:
                keep(version.identity_digest)
                needed.update(builds[model.engines[version.number]])
    recent = last_sweeps(inventory.sweeps, keep_sweeps)
    for sweep in recent:
        for candidate in sweep.candidates:
            keep(candidate.identity.digest, whole_chain=True)
    began = min((sweep.began for sweep in recent if sweep.unfinished), default=None)
    return needed | {piece.place for piece in inventory.pieces if began is not None and piece.made >= began}
