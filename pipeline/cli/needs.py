"""Finds the artifacts of a store that are needed: by engines that serve or may serve again, and by recent candidates.

`walk` lists the artifacts and the unfinished work in a store, with their bytes. Artifacts share files by hard links.

A version or a candidate needs the artifacts of the identity that it cites. The identity names every artifact of its chain:

| needed by | artifacts of the chain that stay |
|---|---|
| champion, previous, routes | inputs of a promotion, a replay and a rollback: both engines, report, identity |
| candidates of the last sweeps | their whole chain: a next evaluation may reuse builds and measurements |
| an unfinished sweep | every artifact made since the sweep began, because no identity names it yet |

Single evaluations are counted separately from sweeps, with the same limit.
Unfinished work of an interrupted evaluation or search stays for thirty days, the limit of the store.
"""

import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.filesize import decimal

from pipeline.cli.grids import Column, Grid, Value, words
from pipeline.config.config import Config
from pipeline.evidence.identity import IDENTITY_FILE, Lineage, read_lineage
from pipeline.registry import summary
from pipeline.registry.summary import Summary
from pipeline.registry.tracking import RegisteredModel, locate
from pipeline.store.store import MANIFEST, PARTIAL, RESUMABLE_S, SCRATCH, read_manifest
from stages.core.digest import file_digest, files_digest
from stages.core.errors import Refusal, UserError

UNFINISHED, SCRATCH_KIND = "unfinished", "scratch"
"""Kinds of pieces that are not artifacts: resumable work of an interrupted command, and temporary directories."""


@dataclass(frozen=True)
class Piece:
    """A directory of a store that is removed or kept as a whole."""

    place: str
    """Path relative to the store's root: `build/0bbee01def1948b5e69ef32590a029cc`."""
    kind: str
    """Stage of an artifact, or `UNFINISHED` or `SCRATCH_KIND`."""
    path: Path
    files: Mapping[tuple[int, int], int]
    """(device, inode) of every file -> its bytes. Hard links share an inode."""
    made: float
    """Time of the last write, in seconds since 1970."""

    @property
    def is_artifact(self) -> bool:
        return self.kind not in (UNFINISHED, SCRATCH_KIND)


def walk(root: Path) -> list[Piece]:
    """Return every piece of a store; empty if the store does not exist. Nothing is written."""
    found = []
    for directory in sorted(root.glob("[!.]*/*")):
        if not directory.is_dir() or directory.is_symlink():
            continue
        if SCRATCH.fullmatch(directory.name):
            found.append(_piece(root, SCRATCH_KIND, directory))
        elif (directory / MANIFEST).is_file():
            found.append(_piece(root, directory.parent.name, directory))
    return found + [_piece(root, UNFINISHED, directory) for directory in sorted((root / PARTIAL).glob("*/*"))]


def distinct_bytes(pieces: Iterable[Piece]) -> int:
    """Return the bytes of pieces. A shared file counts once."""
    return sum({file: size for piece in pieces for file, size in piece.files.items()}.values())


def sizes(title: str, pieces: Iterable[Piece]) -> Grid:
    """Return a table with the number and bytes of every kind of pieces, in their order."""
    kinds: dict[str, list[Piece]] = {}
    for piece in pieces:
        kinds.setdefault(piece.kind, []).append(piece)
    rows: list[list[Value]] = [[kind, len(found), decimal(distinct_bytes(found))] for kind, found in kinds.items()]
    return Grid(title, [*words("kind"), Column("count", "count", ",d"), *words("size")], rows)


def _piece(root: Path, kind: str, path: Path) -> Piece:
    files = dict[tuple[int, int], int]()
    made = 0.0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # another process finished or removed it
                about = Path(folder, name).lstat()
                made = max(made, about.st_mtime)
                if stat.S_ISREG(about.st_mode):
                    files[about.st_dev, about.st_ino] = about.st_size
    return Piece(path.relative_to(root).as_posix(), kind, path, files, made)


REGISTERED_LAST = "candidate"
"""Alias that does not serve: it points at a version of the last sweep."""


@dataclass(frozen=True)
class Held:
    """An identity, and the places of its artifacts: a signed and an unsigned artifact may hold the same identity."""

    identity: Lineage
    places: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """Contents of a work directory and its tracking store."""

    pieces: Sequence[Piece]
    evidence: Mapping[str, Held]
    """Identities by the sha256 of identity.json."""
    models: Sequence[RegisteredModel]
    sweeps: Sequence[Summary]
    """Sweeps, the latest first."""
    problems: Sequence[Refusal]
    """UserError or MissingRequirement for everything that could not be read."""

    @cached_property
    def places(self) -> set[str]:
        """Places of the finished artifacts."""
        return {piece.place for piece in self.pieces if piece.is_artifact}


def find(config: Config) -> Found:
    """Read a work directory and the tracking store. Nothing is written or made."""
    problems = list[Refusal]()
    pieces, evidence, sweeps, models = walk(config.artifacts), dict[str, Held](), list[Summary](), list[RegisteredModel]()
    last = ""

    @contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except Refusal as error:
            problems.append(error)
        except OSError as error:
            problems.append(UserError(str(error)))

    for piece in pieces:
        if piece.kind == "identity":
            with noting():
                digest = file_digest(piece.path / IDENTITY_FILE)
                known = evidence.get(digest) or Held(read_lineage(piece.path / IDENTITY_FILE), ())
                evidence[digest] = Held(known.identity, (*known.places, piece.place))
    for sweep in summary.sweeps(config.work):
        with noting():
            sweeps.append(summary.load(config.work, sweep))
    with noting():
        if config.tracking.enabled and (location := locate(config.tracking, config.work, config.model.label)).exists:
            from pipeline.registry.mlflow_store import RegistryReader  # importing MLflow takes 2 s

            models = RegistryReader(location).registered(evidence)
    with noting():
        last = summary.load(config.work).sweep  # a clock may have been set back between sweeps
    sweeps.sort(key=lambda sweep: (sweep.sweep == last, sweep.began, sweep.sweep), reverse=True)
    return Found(pieces, evidence, models, sweeps, problems)


def last_sweeps(sweeps: Iterable[Summary], number: int) -> list[Summary]:
    """Return the last sweeps up to the `number`-th with candidates, and the last single evaluations likewise."""
    counts = Counter[bool]()
    chosen = []
    for sweep in sweeps:
        if counts[sweep.single] < number:
            chosen.append(sweep)
            counts[sweep.single] += bool(sweep.candidates)
    return chosen


def needs_of(found: Found, keep_sweeps: int) -> dict[str, str]:
    """Return the needed pieces: place of a piece -> its first user.

    If an alias's identity is not found (it was altered or removed, or lies in another work directory), only its engine is kept.
    `keep_sweeps` is the `number` of `last_sweeps`.
    """
    reasons = dict[str, str]()

    def keep(digest: str, who: str, *, whole: bool = False) -> None:
        held = found.evidence.get(digest)
        links = () if held is None else held.identity.chain if whole else held.identity.reads
        for place in () if held is None else (*held.places, *(link.place for link in links)):
            if place in found.places:
                reasons.setdefault(place, who)

    builds: dict[str, list[str]] = {}  # engine's digest -> places, only if some evidence may be missing
    for piece in found.pieces if any(model.engines for model in found.models) else ():
        manifest = read_manifest(piece.path) if piece.kind == "build" else None
        if manifest is not None:
            builds.setdefault(files_digest(manifest["files"]), []).append(piece.place)
    for model in found.models:
        for alias, version in sorted(model.pointed_at.items(), key=lambda item: (item[0] != "champion", item[0])):
            if alias != REGISTERED_LAST:
                keep(version.identity_digest, f"{alias} of {model.name}")
                for place in builds.get(model.engines.get(version.number) or "", ()):
                    reasons.setdefault(place, f"{alias} of {model.name}")
    recent = last_sweeps(found.sweeps, keep_sweeps)
    for sweep in recent:
        for candidate in sweep.candidates:
            keep(candidate.identity.digest, f"{candidate.name} of sweep {sweep.sweep}", whole=True)
    unfinished = (sweep for sweep in recent if sweep.unfinished)
    first = min(unfinished, key=lambda sweep: sweep.began, default=None)
    for piece in found.pieces:
        if piece.kind == UNFINISHED and time.time() - piece.made < RESUMABLE_S:
            reasons.setdefault(piece.place, "the interrupted command, which resumes from it")
        elif piece.is_artifact and first is not None and piece.made >= first.began:
            reasons.setdefault(piece.place, f"sweep {first.sweep}, which has not finished")
    return reasons
