"""What of a store is needed, and by whom: by engines that serve or may serve again, and by the candidates of the last sweeps.

A need is held against the identity that a version or a candidate cites. The identity names every artifact of its chain:

| who | what stays of the chain |
|---|---|
| champion, previous, routes | what a promotion, a replay and a way back read: both engines, report, identity |
| candidates of the last sweeps | what their engines were built from as well: another policy builds on it |
| candidates of the last sweep | what was measured as well: the baseline's log-probabilities, and the rounds against them |
| a sweep that did not finish | whatever was made since it began: no identity names it yet |

What an evaluation or a search left when it was interrupted stays as long as the store keeps it, which is thirty days.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.artifacts.digest import file_digest
from pipeline.artifacts.store import RESUMABLE_S
from pipeline.core.errors import UserError
from pipeline.registry import summary
from pipeline.registry.summary import Candidate, Summary
from pipeline.upkeep.disk import UNFINISHED, Disk, Piece
from pipeline.upkeep.registered import Registered

IDENTITY, IDENTITY_STAGE = "identity.json", "identity"
MEASURED = ("baseline", "round", "once")
"""Stages that measure: what they make is the largest, and only another evaluation on the same samples reads it."""
REGISTERED_LAST = "candidate"
"""The alias that serves nothing: what it points at is of the last sweep."""
BEGAN = re.compile(r"(\d{8}-\d{6})-")
"""How the id of a sweep begins: when it began, by the clock of its machine."""


class Link(Protocol):
    """An artifact of an identity's chain."""

    @property
    def place(self) -> str: ...


class Identity(Protocol):
    """An identity, as far as it names artifacts; `pipeline.evidence.identity` reads one."""

    @property
    def model(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def chain(self) -> Sequence[Link]: ...
    @property
    def reads(self) -> Sequence[Link]:
        """What a promotion, a replay, a way back and a route read: engine, baseline and evaluation."""
        ...


ReadIdentity = Callable[[Path], Identity]
"""Reads an identity.json. Raises UserError where it cannot."""


@dataclass(frozen=True)
class Evidence:
    """The identities of a store by their digests. Several may be the same, signed and not."""

    identities: Mapping[str, tuple[Identity, tuple[str, ...]]]
    """sha256 -> identity, and the places of the artifacts that hold it."""
    unreadable: tuple[str, ...]
    """What is wrong with others, a line each."""


def read_evidence(disk: Disk, read: ReadIdentity) -> Evidence:
    """Read every identity of a store."""
    found: dict[str, tuple[Identity, tuple[str, ...]]] = {}
    unreadable = []
    for place, piece in disk.artifacts.items():
        path = piece.path / IDENTITY
        if piece.kind != IDENTITY_STAGE:
            continue
        try:
            digest = file_digest(path)
            identity, places = found.get(digest, (None, ()))
            found[digest] = (identity or read(path), (*places, place))
        except (OSError, UserError) as error:
            unreadable.append(str(error).splitlines()[0])
    return Evidence(found, tuple(unreadable))


@dataclass(frozen=True)
class Sweep:
    """A command that judged, with its candidates in the order in which they came."""

    name: str
    began: float
    """In seconds since 1970."""
    summary: Summary


def read_sweeps(work: Path) -> tuple[list[Sweep], list[str]]:
    """Return the sweeps of a work directory, the latest first, and what is wrong with those that cannot be read."""
    sweeps, problems = [], []
    for path in (work / summary.FOLDER).glob("[!.]*.json"):
        try:
            sweeps.append(Sweep(path.stem, _began(path), summary.load(work, path.stem)))
        except UserError as error:
            problems.append(str(error).splitlines()[0])
    return sorted(sweeps, key=lambda sweep: sweep.began, reverse=True), problems


def _began(path: Path) -> float:
    stamp = BEGAN.match(path.stem)
    try:
        return time.mktime(time.strptime(stamp[1], "%Y%m%d-%H%M%S")) if stamp is not None else path.stat().st_mtime
    except (ValueError, OverflowError):
        return path.stat().st_mtime


@dataclass(frozen=True)
class Needs:
    """Why the artifacts of a store stay."""

    reasons: Mapping[str, str]
    """Place of an artifact -> who needs it first."""
    missing: Mapping[str, str]
    """Who needs something -> what of it is not in the store."""
    since: float
    """What was made after this time, in seconds since 1970, stays for a sweep that did not finish."""
    unfinished: str | None
    """That sweep."""

    def reason(self, piece: Piece) -> str | None:
        """Return who needs a piece; None where nobody does."""
        if piece.place in self.reasons:
            return self.reasons[piece.place]
        if piece.kind == UNFINISHED and time.time() - piece.made < RESUMABLE_S:
            return "the command that was interrupted, which goes on from it"
        return f"sweep {self.unfinished}, which did not finish" if piece.made >= self.since else None


def needs_of(disk: Disk, evidence: Evidence, registered: Registered, sweeps: Sequence[Sweep], keep_sweeps: int) -> Needs:
    """Say what of a store is needed.

    Args:
        disk: The store.
        evidence: Its identities.
        registered: Versions and aliases.
        sweeps: All of the work directory, the latest first.
        keep_sweeps: Of how many of the last sweeps with candidates these are kept.
    """
    reasons: dict[str, str] = {}
    missing: dict[str, str] = {}

    def keep(digest: str, who: str, *, built: bool = False, measured: bool = False) -> None:
        identity, places = evidence.identities.get(digest, (None, ()))
        if identity is None:
            missing.setdefault(who, "its identity")
            return
        read = {link.place for link in identity.reads}
        wanted = [*places, *(link.place for link in identity.chain if link.place in read)]
        for link in identity.chain:
            if measured if link.place.partition("/")[0] in MEASURED else built:
                wanted.append(link.place)
        for place in wanted:
            if place in disk.artifacts:
                reasons.setdefault(place, who)
            elif place in read:
                missing.setdefault(who, place)

    for model in registered.models:
        for alias, version in sorted(model.pointed_at.items(), key=lambda item: (item[0] != "champion", item[0])):
            if alias != REGISTERED_LAST:
                keep(version.identity_digest, f"{alias} of {model.name}")
    kept = [sweep for sweep in sweeps if sweep.summary.candidates][:keep_sweeps]
    for number, sweep in enumerate(kept):
        for candidate in sweep.summary.candidates:
            keep(candidate.identity.digest, f"{candidate.name} of sweep {sweep.name}", built=True, measured=number == 0)
    oldest = kept[-1].began if kept else 0.0
    recent = [sweep for sweep in sweeps if keep_sweeps and sweep.began >= oldest]
    unfinished = [sweep for sweep in recent if sweep.summary.unfinished is not None]
    first = min(unfinished, key=lambda sweep: sweep.began, default=None)
    return Needs(reasons, missing, float("inf") if first is None else first.began, None if first is None else first.name)


def registered_candidates(sweeps: Iterable[Sweep]) -> list[Candidate]:
    """Return the candidates of sweeps that a tracking store knew."""
    return [candidate for sweep in sweeps for candidate in sweep.summary.candidates if candidate.registration is not None]
