"""Upkeep of a work directory. `stage=status` shows champions, judged candidates and artifacts; `stage=prune` removes artifacts.

An artifact is removed or kept as a whole, because verification needs all of its files. Nothing is removed while another process
uses the store (`pipeline.store.store.used` and `alone`). An artifact is first renamed into the folder of unfinished work, and
then deleted. If the process is killed meanwhile, the next command that makes artifacts deletes the rest. So every artifact in
the store is whole.
"""

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.filesize import decimal

from pipeline.cli import console, next_steps
from pipeline.cli.grids import Column, Grid, Value
from pipeline.cli.tables import COLOURS, print_registry
from pipeline.config.config import Config
from pipeline.evidence.retention import Inventory, Piece, distinct_bytes, first_users, last_sweeps, take_inventory
from pipeline.registry.promotion import PROMOTED_AT, PROMOTED_BY, PROMOTED_OVER, ROLLED_BACK_AT, ROLLED_BACK_BY, ROLLED_BACK_TO
from pipeline.registry.summary import Summary
from pipeline.registry.tracking import RegisteredModel
from pipeline.store.store import IN_USE, USE_LOCK, alone, unfinished
from stages.core.errors import MissingRequirement, UserError
from stages.core.files import POOL

ORDER = {"champion": 0, "previous": 1, "candidate": 3}
"""Order of the aliases in the list. Routes have position 2."""


def show_status(config: Config) -> None:
    """Print the status of a work directory. Raises UserError or MissingRequirement at the end if a part could not be read."""
    inventory = take_inventory(config)
    if not (inventory.pieces or inventory.sweeps or inventory.models or inventory.problems):
        console.say(f"{config.work!s}: nothing was built or judged here yet")
    if not config.tracking.enabled:
        console.say("tracking.enabled=false: what serves is not shown")
    if inventory.location is not None and inventory.location.exists:
        print_registry(inventory.location)
    elif inventory.location is not None and any(sweep.registered for sweep in inventory.sweeps):
        console.say(f"{inventory.location}: there is no such file")
    for model in inventory.models:
        _show_model(model, inventory)
    recent = last_sweeps(inventory.sweeps, max(1, config.prune.keep_sweeps))
    for sweep in recent:
        _show_sweep(sweep, inventory)
    if len(inventory.sweeps) > len(recent):
        console.say(f"and {len(inventory.sweeps) - len(recent)} earlier sweeps")
    if inventory.pieces:
        console.show(sizes("Artifacts", sorted(inventory.pieces, key=lambda piece: piece.kind)))
        console.say(f"{decimal(distinct_bytes(inventory.pieces))} in total; files that several kinds share count once")
    if inventory.problems:
        lines = "\n".join(str(problem).splitlines()[0] for problem in inventory.problems)
        raise type(inventory.problems[0])(lines)


def sizes(title: str, pieces: Iterable[Piece]) -> Grid:
    """Return a table with the number and bytes of the pieces by kind. The kinds are in the order of their first pieces."""
    kinds = defaultdict[str, list[Piece]](list)
    for piece in pieces:
        kinds[piece.kind].append(piece)
    rows: list[list[Value]] = [[kind, len(members), decimal(distinct_bytes(members))] for kind, members in kinds.items()]
    return Grid(title, [Column("kind"), Column("count", form=",d"), Column("size")], rows)


def _show_model(model: RegisteredModel, inventory: Inventory) -> None:
    judged = {candidate.identity.digest: candidate for sweep in inventory.sweeps for candidate in sweep.candidates}
    rows, aliases = [], model.pointed_at
    for alias, version in sorted(aliases.items(), key=lambda item: (ORDER.get(item[0], 2), item[0])):
        digest = version.identity_digest
        covered = judged[digest].covered if digest in judged else None
        notes = ", ".join(filter(None, (covered, _missing(digest, inventory))))
        date = datetime.fromtimestamp(version.made, UTC).isoformat(" ", "minutes")[:16]
        rows.append([alias, version.number, version.name, version.tags.get("verdict", "unknown"), date, notes])
    columns = list(map(Column, ("alias", "version", "engine", "verdict", "registered", "holds")))
    console.show(Grid(f"{model.name}: versions {len(model.versions)}", columns, rows, COLOURS))
    champion = aliases.get("champion")
    if champion is None:
        console.say(f"{model.name} has no champion yet")
        return
    promoted = champion.tags.get(PROMOTED_AT, "")
    if promoted:
        previous = model.versions.get(champion.tags.get(PROMOTED_OVER, ""))
        over = "" if previous is None else f", over {previous}"
        console.say(f"  champion: promoted {_minute(promoted)} UTC by {champion.tags.get(PROMOTED_BY)}{over}")
    # A rollback before the champion's own promotion, or to another version, does not matter any more.
    returned = max(model.versions.values(), key=lambda version: version.tags.get(ROLLED_BACK_AT, ""))
    if returned.tags.get(ROLLED_BACK_TO) == champion.number and returned.tags[ROLLED_BACK_AT] > promoted:
        when, user = _minute(returned.tags[ROLLED_BACK_AT]), returned.tags.get(ROLLED_BACK_BY)
        console.say(f"  champion: serves since {user} rolled {returned} back at {when} UTC")
    if "previous" not in aliases:
        console.say("  no previous champion: stage=rollback has nothing to return to")


def _minute(timestamp: str) -> str:
    return timestamp.replace("T", " ")[:16]


def _missing(digest: str, inventory: Inventory) -> str | None:
    """Return a clause that names the first missing part of an engine's evidence; None if the work directory has all parts."""
    lineage = inventory.lineages.get(digest)
    if lineage is None:
        return "its evidence is not here"
    return next((f"{link.place} is not here" for link in lineage.reads if link.place not in inventory.artifact_places), None)


def _show_sweep(sweep: Summary, inventory: Inventory) -> None:
    rows, unfinished = [], sweep.unfinished
    for candidate in sweep.candidates:
        covered = candidate.covered if candidate.verdict == "PASS" else None
        reasons = "; ".join(filter(None, (_missing(candidate.identity.digest, inventory), *candidate.reasons[:1], covered)))
        version = candidate.version or "-"
        rows.append([candidate.name, candidate.verdict, version, candidate.model, candidate.backend, reasons])
    missing = f", which has not finished: {unfinished.rpartition(': ')[2]}" if unfinished is not None else ""
    title = f"sweep {sweep.sweep}{missing or ('' if rows else ': no candidate')}"
    if rows:
        columns = list(map(Column, ("candidate", "verdict", "version", "model", "backend", "because")))
        console.show(Grid(title, columns, rows, COLOURS))
    else:
        console.say(title)


FIRST = ("baseline", "round", "baseline_once", "once", "identity", "evaluate")
"""Kinds that are removed first, in this order. Other kinds follow.

Measurements come first, because the baseline's log-probabilities take the most space. Identities come before the engines, so
that an interrupted removal leaves no identity without its engines.
"""


@dataclass(frozen=True)
class PrunePlan:
    """Pieces to remove from a store, in this order, and the reasons for pieces that stay."""

    removable: tuple[Piece, ...]
    freed_bytes: int
    """Bytes freed by the removal. Files that a kept artifact still links to are not counted."""
    kept: dict[str, int]
    """Reason to keep (such as `champion of MODEL`) -> number of pieces. A piece with several reasons counts for the first."""


def prune(config: Config) -> None:
    """Show the pieces that are not needed, and remove these pieces if `prune.apply` is set."""
    root = config.artifacts
    if not root.is_dir():
        console.say(f"{root!s}: there are no artifacts")
        return
    applied, lock = config.prune.apply, root / USE_LOCK
    if applied and lock.exists() and not os.access(lock, os.W_OK):
        raise UserError(f"stage=prune: {lock} cannot be locked, because this user may not write to it; grant write permission")
    exclusive: AbstractContextManager[bool] = alone(root) if applied else nullcontext(True)
    with exclusive as unused:  # no command can change the needs meanwhile
        if not unused:
            raise MissingRequirement(
                f"stage=prune: another command uses the artifacts in {root}; nothing was removed: wait until it ends, or find "
                f"it with `fuser {root / IN_USE}` and end it"
            )
        plan = make_plan(config)
        if applied:
            remove(root, plan.removable)
    _print(plan, applied=applied)
    if plan.removable and not applied:
        keep = f"prune.keep_sweeps={config.prune.keep_sweeps}"
        command = next_steps.stage_command(config, "prune", keep, "prune.apply=true")
        next_steps.NextStep("remove it", command).show()


def make_plan(config: Config) -> PrunePlan:
    """Return the pieces to remove and to keep. Raises UserError or MissingRequirement if the needs cannot be determined."""
    inventory = take_inventory(config)
    for problem in inventory.problems:
        line = str(problem).splitlines()[0]
        repair = "repair it or remove it: " if isinstance(problem, UserError) else ""  # not a store that is only busy
        raise type(problem)(f"stage=prune: {line}; {repair}it may name needed artifacts")
    _check_known(config, inventory)
    users = first_users(inventory, config.prune.keep_sweeps)
    removable = [piece for piece in inventory.pieces if piece.place not in users]
    order = {kind: number for number, kind in enumerate(FIRST)}
    removable.sort(key=lambda piece: (order.get(piece.kind, len(order)), piece.kind, piece.place))
    needed = [piece for piece in inventory.pieces if piece.place in users]
    freed_bytes = distinct_bytes(inventory.pieces) - distinct_bytes(needed)
    return PrunePlan(tuple(removable), freed_bytes, dict(Counter(users.values())))


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
            # unfinished work, which a later command removes if this process is killed
            scratch = unfinished(root, piece.kind, path.name, resumable=False)
            scratch.parent.mkdir(parents=True, exist_ok=True)
            path = path.rename(scratch)
        shutil.rmtree(path)
    for file in (root / POOL).glob("*"):
        if file.stat().st_nlink == 1:
            file.unlink()


def _print(plan: PrunePlan, *, applied: bool) -> None:
    if plan.removable:
        console.show(sizes("Removed" if applied else "To remove", plan.removable))
        console.say(f"{decimal(plan.freed_bytes)} {'are' if applied else 'would be'} free: kinds share files")
    else:
        console.say("Nothing to remove: everything is needed")
    for user, count in plan.kept.items():
        console.say(f"stays: {count} for {user}")
