"""`stage=status`: prints serving engines, judged candidates and artifacts on disk. Writes nothing; `log=json` prints JSON."""

from datetime import UTC, datetime

from rich.filesize import decimal
from rich.markup import escape

from pipeline.cli import console
from pipeline.cli.grids import Column, Grid, words
from pipeline.cli.needs import Found, distinct_bytes, find, last_sweeps, sizes
from pipeline.cli.tables import COLOURS
from pipeline.config.config import Config
from pipeline.registry.promotion import PROMOTED_AT, PROMOTED_BY, PROMOTED_OVER
from pipeline.registry.summary import Summary
from pipeline.registry.tracking import RegisteredModel

ORDER = {"champion": 0, "previous": 1, "candidate": 3}
"""Order of the aliases in the list. Routes have position 2."""


def show_status(config: Config) -> None:
    """Print the status of a work directory. Raises UserError or MissingRequirement at the end if a part could not be read."""
    found = find(config)
    if not (found.pieces or found.sweeps or found.models or found.problems):
        console.say(f"{escape(str(config.work))}: nothing was built or judged here yet")
    if not config.tracking.enabled:
        console.say("tracking.enabled=false: what serves is not shown")
    for model in found.models:
        _show_model(model, found)
    shown = last_sweeps(found.sweeps, max(1, config.prune.keep_sweeps))
    for sweep in shown:
        _show_sweep(sweep, found)
    if len(found.sweeps) > len(shown):
        console.say(f"and {len(found.sweeps) - len(shown)} sweeps before them")
    if found.pieces:
        console.show("artifacts", sizes("Artifacts", sorted(found.pieces, key=lambda piece: piece.kind)))
        console.say(f"{decimal(distinct_bytes(found.pieces))} in all: kinds share files")
    if found.problems:
        lines = "\n".join(str(problem).splitlines()[0] for problem in found.problems)
        raise type(found.problems[0])(lines)


def _show_model(model: RegisteredModel, found: Found) -> None:
    judged = {one.identity.digest: one for sweep in found.sweeps for one in sweep.candidates}
    rows, pointed_at = [], model.pointed_at
    for alias, version in sorted(pointed_at.items(), key=lambda item: (ORDER.get(item[0], 2), item[0])):
        digest = version.identity_digest
        covered = judged[digest].covered if digest in judged else None
        holds = ", ".join(filter(None, (covered, _missing(digest, found))))
        made = datetime.fromtimestamp(version.made, UTC).isoformat(" ", "minutes")[:16]
        rows.append([alias, version.number, version.name, version.tags.get("verdict", "unknown"), made, holds])
    columns = *words("alias", "version", "engine", "verdict", "registered"), Column("holds", "holds", kind="text")
    console.show("aliases", Grid(f"{model.name}: versions {len(model.versions)}", columns, rows, COLOURS))
    champion = pointed_at.get("champion")
    if champion is None:
        console.say(f"{escape(model.name)} has no champion yet")
        return
    if PROMOTED_AT in champion.tags:
        at, by = champion.tags[PROMOTED_AT].replace("T", " ")[:16], champion.tags.get(PROMOTED_BY)
        before = model.versions.get(champion.tags.get(PROMOTED_OVER, ""))
        console.say(escape(f"  champion: promoted {at} UTC by {by}{'' if before is None else f', over {before}'}"))
    if "previous" not in pointed_at:
        console.say("  no previous champion: stage=rollback has nothing to return to")


def _missing(digest: str, found: Found) -> str | None:
    """Return a clause about evidence, or an artifact of it, that is not in the work directory; None if all is there."""
    evidence = found.evidence.get(digest)
    if evidence is None:
        return "its evidence is not here"
    return next((f"{link.place} is not here" for link in evidence.identity.reads if link.place not in found.places), None)


def _show_sweep(sweep: Summary, found: Found) -> None:
    rows, unfinished = [], sweep.unfinished
    for one in sweep.candidates:
        covered = one.covered if one.verdict == "PASS" else None
        because = "; ".join(filter(None, (_missing(one.identity.digest, found), *one.reasons[:1], covered)))
        rows.append([one.name, one.verdict, one.version or "-", one.model, one.backend, because])
    missing = f", which has not finished: {unfinished.rpartition(': ')[2]}" if unfinished is not None else ""
    title = f"sweep {sweep.sweep}{missing or ('' if rows else ': no candidate')}"
    if rows:
        first, last = (Column(key, key, kind="text") for key in ("candidate", "because"))
        console.show("sweep", Grid(title, (first, *words("verdict", "version", "model", "backend"), last), rows, COLOURS))
    else:
        console.say(escape(title))
