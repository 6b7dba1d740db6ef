"""`stage=status`: prints serving engines, judged candidates and artifacts on disk. Writes nothing; `log=json` prints JSON."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime

from rich.filesize import decimal
from rich.markup import escape

from pipeline.cli import console
from pipeline.cli.grids import Column, Grid, Value
from pipeline.cli.tables import COLOURS
from pipeline.config.config import Config
from pipeline.evidence.retention import Inventory, Piece, distinct_bytes, last_sweeps, take_inventory
from pipeline.registry.promotion import PROMOTED_AT, PROMOTED_BY, PROMOTED_OVER
from pipeline.registry.summary import Summary
from pipeline.registry.tracking import RegisteredModel

ORDER = {"champion": 0, "previous": 1, "candidate": 3}
"""Order of the aliases in the list. Routes have position 2."""


def show_status(config: Config) -> None:
    """Print the status of a work directory. Raises UserError or MissingRequirement at the end if a part could not be read."""
    inventory = take_inventory(config)
    if not (inventory.pieces or inventory.sweeps or inventory.models or inventory.problems):
        console.say(f"{escape(str(config.work))}: nothing was built or judged here yet")
    if not config.tracking.enabled:
        console.say("tracking.enabled=false: what serves is not shown")
    for model in inventory.models:
        _show_model(model, inventory)
    recent = last_sweeps(inventory.sweeps, max(1, config.prune.keep_sweeps))
    for sweep in recent:
        _show_sweep(sweep, inventory)
    if len(inventory.sweeps) > len(recent):
        console.say(f"and {len(inventory.sweeps) - len(recent)} earlier sweeps")
    if inventory.pieces:
        console.show("artifacts", sizes("Artifacts", sorted(inventory.pieces, key=lambda piece: piece.kind)))
        console.say(f"{decimal(distinct_bytes(inventory.pieces))} in total; files that several kinds share count once")
    if inventory.problems:
        lines = "\n".join(str(problem).splitlines()[0] for problem in inventory.problems)
        raise type(inventory.problems[0])(lines)


def sizes(title: str, pieces: Iterable[Piece]) -> Grid:
    """Return a table with the number and bytes of every kind of pieces, in their order."""
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
    console.show("aliases", Grid(f"{model.name}: versions {len(model.versions)}", columns, rows, COLOURS))
    champion = aliases.get("champion")
    if champion is None:
        console.say(f"{escape(model.name)} has no champion yet")
        return
    if PROMOTED_AT in champion.tags:
        time, user = champion.tags[PROMOTED_AT].replace("T", " ")[:16], champion.tags.get(PROMOTED_BY)
        previous = model.versions.get(champion.tags.get(PROMOTED_OVER, ""))
        console.say(escape(f"  champion: promoted {time} UTC by {user}{'' if previous is None else f', over {previous}'}"))
    if "previous" not in aliases:
        console.say("  no previous champion: stage=rollback has nothing to return to")


def _missing(digest: str, inventory: Inventory) -> str | None:
    """Return a clause about evidence, or an artifact of it, that is not in the work directory; None if all is there."""
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
        console.show("sweep", Grid(title, columns, rows, COLOURS))
    else:
        console.say(escape(title))
