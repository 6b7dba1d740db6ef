"""`stage=prune`: chooses the artifacts to remove, and removes them.

An artifact is removed or kept as a whole, because verification needs all of its files. Nothing is removed while another process
uses the store (`pipeline.store.store.used` and `alone`). A removal first renames an artifact to the name of a leftover,
which every later command removes. So a killed removal leaves only whole artifacts.
"""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from rich.filesize import decimal
from rich.markup import escape

from pipeline.cli import console, next_steps
from pipeline.cli.status import sizes
from pipeline.config.config import Config
from pipeline.evidence.retention import Inventory, Piece, distinct_bytes, first_users, take_inventory
from pipeline.store.store import USE_LOCK, alone
from stages.core.errors import MissingRequirement, UserError
from stages.core.files import POOL

FIRST = ("baseline", "round", "baseline_once", "once", "identity", "evaluate")
"""Kinds that are removed first. The baseline's log-probabilities are the largest, and no identity outlives its engines."""


@dataclass(frozen=True)
class PrunePlan:
    """Pieces to remove from a store, in this order, and the reasons for pieces that stay."""

    removable: tuple[Piece, ...]
    freed_bytes: int
    """Bytes freed by the removal. Files that a kept artifact still links to are not counted."""
    kept: dict[str, int]
    """User -> number of kept pieces. A piece with several users counts only for the first."""
    unpromotable: tuple[str, ...]
    """Registered versions whose evidence is removed."""


def prune(config: Config) -> None:
    """Show the pieces that are not needed, and remove these pieces if `prune.apply` is set."""
    root = config.artifacts
    if not root.is_dir():
        console.say(f"{escape(str(root))}: there are no artifacts")
        return
    applied, lock = config.prune.apply, root / USE_LOCK
    if applied and lock.exists() and not os.access(lock, os.W_OK):
        raise UserError(f"stage=prune: {lock} cannot be locked, because this user may not write to it; grant write permission")
    exclusive: AbstractContextManager[list[str]] = alone(root) if applied else nullcontext([])
    with exclusive as processes:  # no command can change the needs meanwhile
        if processes:
            raise MissingRequirement(
                f"stage=prune: the artifacts in {root} are used by {', '.join(processes)}; nothing was removed: wait until it "
                "ends, or end it"
            )
        plan = make_plan(config)
        if applied:
            remove(root, plan.removable)
    _print(plan, applied=applied)
    if plan.removable and not applied:
        keep = f"prune.keep_sweeps={config.prune.keep_sweeps}"
        command = next_steps.standing(config, "prune", keep, "prune.apply=true")
        next_steps.NextStep("remove it", command).show()


def make_plan(config: Config) -> PrunePlan:
    """Return the pieces to remove and to keep. Raises UserError or MissingRequirement if the needs cannot be determined."""
    inventory = take_inventory(config)
    for problem in inventory.problems:
        line = str(problem).splitlines()[0]
        raise type(problem)(f"stage=prune: {line}; repair it or remove it: it may name needed artifacts")
    _check_known(config, inventory)
    users = first_users(inventory, config.prune.keep_sweeps)
    removable = [piece for piece in inventory.pieces if piece.place not in users]
    order = {kind: number for number, kind in enumerate(FIRST)}
    removable.sort(key=lambda piece: (order.get(piece.kind, len(order)), piece.kind, piece.place))
    removed = {piece.place for piece in removable}
    unpromotable = tuple(
        f"version {version.number} of {model.name} ({version.name})"
        for model in inventory.models
        for version in model.versions.values()
        if version.identity_digest in inventory.lineages and inventory.identity_places[version.identity_digest] <= removed
    )
    needed = [piece for piece in inventory.pieces if piece.place in users]
    freed_bytes = distinct_bytes(inventory.pieces) - distinct_bytes(needed)
    return PrunePlan(tuple(removable), freed_bytes, dict(Counter(users.values())), unpromotable)


def _check_known(config: Config, inventory: Inventory) -> None:
    """Refuse a tracking store that does not know the engines which were registered from this work directory."""
    registered = {version.identity_digest for model in inventory.models for version in model.versions.values()}
    candidates = [candidate for sweep in inventory.sweeps for candidate in sweep.candidates if candidate.version]
    for model in sorted({candidate.model for candidate in candidates}):
        if registered.isdisjoint(candidate.identity.digest for candidate in candidates if candidate.model == model):
            raise UserError(
                f"stage=prune: engines of model {model} were registered from {config.work}, but not in the tracking store of "
                "this command, so it is unknown which engines serve; leave tracking on, and name the right store with "
                "tracking.uri or MLFLOW_TRACKING_URI"
            )


def remove(root: Path, pieces: Sequence[Piece]) -> None:
    """Remove pieces in their order, then pool files without other links. The caller must hold the store alone."""
    for piece in pieces:
        path = piece.path
        if piece.is_artifact:
            # the name of a temporary directory: a later command removes it if this process is killed
            path = path.rename(path.with_name(f".{path.name}-prune{token_hex(8)}"))
        shutil.rmtree(path)
    for file in (root / POOL).glob("*"):
        if file.stat().st_nlink == 1:
            file.unlink()


def _print(plan: PrunePlan, *, applied: bool) -> None:
    if plan.removable:
        console.show("pruned", sizes("Removed" if applied else "To remove", plan.removable))
        console.say(f"{decimal(plan.freed_bytes)} {'are' if applied else 'would be'} free: kinds share files")
    else:
        console.say("Nothing to remove: everything is needed")
    for user, count in plan.kept.items():
        console.say(f"stays: {count} for {escape(user)}")
    for version in plan.unpromotable:
        console.say(f"[yellow]note:[/] {escape(version)} must be judged again before it can be promoted")
