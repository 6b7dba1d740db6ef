"""Upkeep of a work directory. `stage=status` shows champions, judged candidates and artifacts; `stage=prune` removes artifacts.

An artifact is removed or kept as a whole, because verification needs all of its files. Nothing is removed while another process
uses the store (`pipeline.store.store.used`). An artifact is first renamed into the folder of unfinished work, and then deleted.
If the process is killed meanwhile, the next command that makes artifacts deletes the rest. So every artifact in
the store is whole.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from rich.filesize import decimal

from pipeline.cli import console, next_steps
from pipeline.cli.console import Column, Grid, Value
from pipeline.cli.tables import COLOURS, print_registry
from pipeline.config.config import Config
from pipeline.evidence.retention import Inventory, Piece, distinct_bytes, last_sweeps, needed_places, take_inventory
from pipeline.registry.promotion import PROMOTED_AT, PROMOTED_BY, PROMOTED_OVER, ROLLED_BACK_AT, ROLLED_BACK_BY, ROLLED_BACK_TO
from pipeline.registry.summary import Summary
from pipeline.registry.tracking import RegisteredModel
from pipeline.store.locks import locked_at_once
from pipeline.store.store import IN_USE, unfinished
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
        console.say(f"{inventory.location}: its file is missing or empty")
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
    if digest not in inventory.identities:
        return "its evidence is not here"
    _, lineage = inventory.identities[digest]
    places = {piece.place for piece in inventory.pieces}
    return next((f"{link.place} is not here" for link in lineage.reads if link.place not in places), None)


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


def prune(config: Config) -> None:
    """Show the pieces that are not needed, and remove these pieces if `prune.apply` is set."""
    root = config.artifacts
    if not root.is_dir():
        console.say(f"{root!s}: there are no artifacts")
        return
    applied, lock = config.prune.apply, root / IN_USE
    if applied and not os.access(lock if lock.exists() else root, os.W_OK):
        raise UserError(f"stage=prune: {lock} cannot be locked, because this user may not write to it; grant write permission")
    exclusive: AbstractContextManager[bool] = locked_at_once(lock) if applied else nullcontext(True)
    with exclusive as unused:  # no command can change the needs meanwhile
        if not unused:
            raise MissingRequirement(
                f"stage=prune: another command uses the artifacts in {root}; nothing was removed: wait until it ends, or find "
                f"it with `fuser {lock}` and end it"
            )
        removable = find_removable(config)
        if applied:
            remove(root, removable)
    if not removable:
        console.say("Nothing to remove: everything is needed")
        return
    console.show(sizes("Removed" if applied else "To remove", removable))
    console.say("files that kept artifacts share stay")
    if not applied:
        keep = f"prune.keep_sweeps={config.prune.keep_sweeps}"
        command = next_steps.stage_command(config, "prune", keep, "prune.apply=true")
        next_steps.NextStep("remove it", command).show()


def find_removable(config: Config) -> list[Piece]:
    """Return the pieces to remove. Raises UserError or MissingRequirement if the needs cannot be determined."""
    inventory = take_inventory(config)
    for problem in inventory.problems:
        line = str(problem).splitlines()[0]
        repair = "repair it or remove it: " if isinstance(problem, UserError) else ""  # not a store that is only busy
        raise type(problem)(f"stage=prune: {line}; {repair}it may name needed artifacts")
    _check_known(config, inventory)
    needed = needed_places(inventory, config.prune.keep_sweeps)
    removable = [piece for piece in inventory.pieces if piece.place not in needed]
    # Identities come first, so that an interrupted removal leaves no identity without its engines.
    return sorted(removable, key=lambda piece: (piece.kind != "identity", piece.kind))


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
        # unfinished work, which a later command removes if this process is killed
        scratch = unfinished(root, piece.kind, piece.path.name, resumable=False)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(piece.path.rename(scratch))
    for file in (root / POOL).glob("*"):
        if file.stat().st_nlink == 1:
            file.unlink()
