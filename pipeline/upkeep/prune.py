"""`stage=prune`: what goes of a store, and how. An artifact goes whole, or stays whole: it is verified by all of its files.

Nothing of a store is removed while another process uses it: commands hold the store's lock together (`pipeline.artifacts.store.
used`), and a prune alone. A removal first renames, to a name that every later command removes as what a dead process left: who
is killed in the middle leaves only whole artifacts.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts.locks import alone_at_once, holders
from pipeline.artifacts.store import USE_LOCK
from pipeline.core.errors import MissingRequirement
from pipeline.core.redaction import redact_text
from pipeline.upkeep.disk import (
    POOL_KIND,
    SCRATCH_KIND,
    UNFINISHED,
    Disk,
    Piece,
    by_kind,
    distinct_bytes,
    freed_bytes,
    is_being_made,
    names_held,
)
from pipeline.upkeep.needs import Evidence, Needs
from pipeline.upkeep.registered import Registered

COMMAND_CHARS = 120
"""Of a command line that is shown."""
FIRST = ("baseline", "round", "once", "identity", "evaluate")
"""The order in which kinds go: the baseline's log-probabilities are the largest, and no identity outlives what it names."""


@dataclass(frozen=True)
class Plan:
    """What goes of a store, in this order, and what stays."""

    gone: tuple[Piece, ...]
    stays: dict[str, int]
    """Who needs something -> how many artifacts they are the first to need."""
    left_behind: tuple[str, ...]
    """Registered versions whose evidence goes."""

    @property
    def freed_bytes(self) -> int:
        """Bytes that are free afterwards; a file that something shares which stays is none of them."""
        return freed_bytes(self.gone)

    @property
    def kinds(self) -> list[tuple[str, list[Piece], int]]:
        """Kind, pieces, and their bytes, in the order in which they go."""
        return [(kind, pieces, distinct_bytes(pieces)) for kind, pieces in by_kind(self.gone).items()]


def make_plan(disk: Disk, needs: Needs, evidence: Evidence, registered: Registered) -> Plan:
    """Return what goes of a store that nobody uses: artifacts without need, scratch, and files that only they link to."""
    stays: dict[str, int] = {}
    gone = []
    for piece in (*disk.artifacts.values(), *disk.unfinished):
        who = needs.reason(piece)
        if who is None:
            gone.append(piece)
        else:
            stays[who] = stays.get(who, 0) + 1
    order = {kind: number for number, kind in enumerate(FIRST)}
    gone.sort(key=lambda piece: (order.get(piece.kind, len(order)), piece.kind, piece.place))
    gone += [piece for piece in disk.scratch if not is_being_made(piece)]
    names = names_held(gone)
    # A file of the pool has one name of its own.
    gone += [piece for piece in disk.pool if all(file.links <= names[file.number] + 1 for file in piece.files)]
    places = {piece.place for piece in gone}
    lost = {digest for digest, (_, held) in evidence.identities.items() if places.issuperset(held)}
    behind = [
        str(version) for model in registered.models for version in model.versions.values() if version.identity_digest in lost
    ]
    return Plan(tuple(gone), stays, tuple(behind))


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold a store alone while the block runs: commands that begin meanwhile wait.

    Raises:
        MissingRequirement: when another process uses it.
    """
    with alone_at_once(root / USE_LOCK) as free:
        if not free:
            who = in_use_by(root) or f"another process uses the artifacts in {root}"
            raise MissingRequirement(f"stage=prune: {who}; nothing was removed: wait until it ends, or end it")
        yield


def in_use_by(root: Path) -> str | None:
    """Say which processes use a store, as far as this system tells; None where it sees none."""
    named = [f"process {pid} ({_command(pid)})" for pid in holders(root / USE_LOCK) if pid > 0]
    return f"{', '.join(named)} use{'s' if len(named) < 2 else ''} the artifacts in {root}" if named else None


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "of another user"
    return redact_text(" ".join(word for word in words if "=" in word))[:COMMAND_CHARS] or Path(words[0]).name


def apply(gone: Sequence[Piece]) -> None:
    """Remove pieces of a store that is held alone, in their order."""
    for piece in gone:
        if piece.kind == POOL_KIND:
            piece.path.unlink(missing_ok=True)
        elif piece.kind in (SCRATCH_KIND, UNFINISHED):  # nobody takes it for an artifact
            shutil.rmtree(piece.path)
        else:
            # the name that the store gives to what is being made, and removes where nobody makes it
            scratch = piece.path.with_name(f".{piece.path.name}-prune{os.getpid()}")
            piece.path.rename(scratch)
            shutil.rmtree(scratch)
