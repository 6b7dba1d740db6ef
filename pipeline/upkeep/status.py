"""`stage=status`: what serves, what was judged, what lies on the disk. Nothing is written."""

import json
import sys
import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from rich.filesize import decimal
from rich.markup import escape

from pipeline.config.config import Config
from pipeline.registry.promotion import PASS, PROMOTED_AT, PROMOTED_BY, PROMOTED_OVER
from pipeline.registry.summary import Candidate
from pipeline.registry.tracking import Version
from pipeline.terminal import console, next_steps
from pipeline.terminal.grids import Column, Grid, Row
from pipeline.terminal.next_steps import Step
from pipeline.terminal.tables import COLOURS
from pipeline.upkeep.needs import Found, Held, Sweep, distinct_bytes, find, last_sweeps, needs_of
from pipeline.upkeep.registered import Model

SCHEMA_VERSION: Final = 1
ORDER = {"champion": 0, "previous": 1, "candidate": 3}
"""In which aliases are listed; routes come between."""
CANDIDATE = {"name", "policy", "model", "backend", "verdict", "covered", "reasons"}

Document = dict[str, Any]


def show_status(config: Config, *, as_json: bool) -> None:
    """Print the status of a work directory, as tables or as one JSON document."""
    found = find(config)
    reasons, missing = needs_of(found, config.prune.keep_sweeps)
    status, step = make_status(config, found, missing), _step(config, found, reasons)
    if as_json:
        whole = {**status, "next": step.model_dump() if step is not None else None}
        sys.stdout.write(json.dumps(whole, indent=2) + "\n")
    else:
        _print(config, status)
        if step is not None:
            next_steps.show(step)


def make_status(config: Config, found: Found, missing: Mapping[str, str]) -> Document:
    """Return what `--json` prints of a work directory, but for what to do next. Times are ISO 8601, sizes bytes.

    `evidence` is the place of an identity in the store, null where the identity is not in this work directory. A file counts
    once in `store_bytes`, and once in each kind, however many artifacts link to it. `missing` says who needs something of the
    store, and what of it is not here.
    """
    judged = {one.identity.digest: one for sweep in found.sweeps for one in sweep.summary.candidates}
    kinds = {kind: [piece for piece in found.pieces if piece.kind == kind] for kind in sorted({p.kind for p in found.pieces})}
    return {
        "schema_version": SCHEMA_VERSION,
        "at": _time(time.time()),
        "workdir": str(config.work),
        "models": [_model(model, found.evidence, judged) for model in found.models],
        "sweeps": [_sweep(sweep, found.evidence) for sweep in last_sweeps(found.sweeps, max(1, config.prune.keep_sweeps))],
        "sweeps_in_all": len(found.sweeps),
        "kinds": [{"kind": kind, "count": len(pieces), "size_bytes": distinct_bytes(pieces)} for kind, pieces in kinds.items()],
        "store_bytes": distinct_bytes(found.pieces),
        "missing": missing,
        "problems": [str(problem).splitlines()[0] for problem in found.problems],
    }


def _step(config: Config, found: Found, needed: Collection[str]) -> Step | None:
    champions = [model.pointed_at["champion"].identity_digest for model in found.models if "champion" in model.pointed_at]
    here = [found.root / found.evidence[one].identity.reads[0].place for one in champions if one in found.evidence]
    candidates = [[one for one in sweep.summary.candidates if one.model == config.model.label] for sweep in found.sweeps]
    last = next(filter(None, candidates), [])
    passed = any(one.verdict == PASS and one.registration is not None for one in last)
    return next_steps.after_status(
        config,
        judged=bool(found.sweeps),
        promotable=passed and not any(one.identity.digest in champions for one in last),
        champion=next(iter(here), None),
        prunable=any(piece.is_artifact and piece.place not in needed for piece in found.pieces),
    )


def _model(model: Model, evidence: Mapping[str, Held], judged: Mapping[str, Candidate]) -> Document:
    listed = sorted(model.pointed_at.items(), key=lambda item: (ORDER.get(item[0], 2), item[0]))
    return {
        "name": model.name,
        "versions": len(model.versions),
        "aliases": [_alias(model, alias, version, evidence, judged) for alias, version in listed],
    }


def _alias(
    model: Model, alias: str, version: Version, evidence: Mapping[str, Held], judged: Mapping[str, Candidate]
) -> Document:
    """Describe the engine that an alias points at, and its last promotion."""
    before = model.versions.get(version.tags.get(PROMOTED_OVER, ""))
    tags, candidate = version.tags, judged.get(version.identity_digest)
    return {
        "alias": alias,
        "version": version.number,
        "name": version.name,
        "verdict": tags.get("verdict", "unknown"),
        "covered": candidate.covered if candidate is not None else None,
        "registered_at": _time(version.made),
        PROMOTED_AT: tags.get(PROMOTED_AT),
        PROMOTED_BY: tags.get(PROMOTED_BY),
        PROMOTED_OVER: str(before) if before is not None else None,
        "evidence": _place(evidence, version.identity_digest),
    }


def _sweep(sweep: Sweep, evidence: Mapping[str, Held]) -> Document:
    candidates = [
        {
            **one.model_dump(mode="json", include=CANDIDATE),
            "version": one.registration.model_version if one.registration is not None else None,
            "evidence": _place(evidence, one.identity.digest),
        }
        for one in sweep.summary.candidates
    ]
    unfinished = sweep.summary.unfinished
    return {"sweep": sweep.name, "began_at": _time(sweep.began), "unfinished": unfinished, "candidates": candidates}


def _place(evidence: Mapping[str, Held], digest: str) -> str | None:
    return evidence[digest].places[0] if digest in evidence else None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _print(config: Config, status: Document) -> None:
    for problem in status["problems"]:
        console.say(f"[yellow]cannot be read:[/] {escape(problem)}")
    if not status["kinds"] and not status["sweeps"] and not status["models"]:
        console.say(f"{escape(status['workdir'])}: nothing was built or judged here yet")
    if not config.tracking.enabled:
        console.say("tracking.enabled=false: what serves is not shown")
    for model in status["models"]:
        _print_model(model)
    for sweep in status["sweeps"]:
        _print_sweep(sweep)
    if status["sweeps_in_all"] > len(status["sweeps"]):
        console.say(f"and {status['sweeps_in_all'] - len(status['sweeps'])} sweeps before them")
    if status["kinds"]:
        rows = [Row(kind["kind"], [kind["count"], decimal(kind["size_bytes"])]) for kind in status["kinds"]]
        console.show("artifacts", Grid("Artifacts", "kind", (Column("count", "count", ",d"), *_words("size")), rows))
        console.say(f"{decimal(status['store_bytes'])} in all: kinds share files")
    for who, what in status["missing"].items():
        console.say(f"[yellow]note:[/] {escape(who)}: {escape(what)} is not in this work directory")


def _print_model(model: Document) -> None:
    rows = []
    for one in model["aliases"]:
        holds = ", ".join(filter(None, (one["covered"], None if one["evidence"] else "its evidence is not here")))
        rows.append(Row(one["alias"], [one["version"], one["name"], one["verdict"], _minute(one["registered_at"])], holds))
    columns = _words("version", "engine", "verdict", "registered")
    console.show("aliases", Grid(f"{model['name']}: versions {model['versions']}", "alias", columns, rows, "holds", COLOURS))
    for one in model["aliases"]:
        if one["alias"] == "champion" and one[PROMOTED_AT] is not None:
            over = f", over {one[PROMOTED_OVER]}" if one[PROMOTED_OVER] is not None else ""
            console.say(escape(f"  champion: promoted {_minute(one[PROMOTED_AT])} UTC by {one[PROMOTED_BY]}{over}"))
    names = {one["alias"] for one in model["aliases"]}
    if "champion" not in names:
        console.say(f"{escape(model['name'])} has no champion yet")
    elif "previous" not in names:
        console.say("  no previous champion: stage=rollback has nothing to return to")


def _print_sweep(sweep: Document) -> None:
    rows = []
    for one in sweep["candidates"]:
        gone, covered = None if one["evidence"] else "its evidence is gone", one["covered"] if one["verdict"] == PASS else None
        because = "; ".join(filter(None, (gone, next(iter(one["reasons"]), None), covered)))
        rows.append(Row(one["name"], [one["verdict"], one["version"] or "-", one["model"], one["backend"]], because))
    missing = f", which did not finish: {sweep['unfinished'].rpartition(': ')[2]}" if sweep["unfinished"] else ""
    title = f"sweep {sweep['sweep']}{missing or ('' if rows else ': no candidate')}"
    if rows:
        columns = _words("verdict", "version", "model", "backend")
        console.show("sweep", Grid(title, "candidate", columns, rows, "because", COLOURS))
    else:
        console.say(escape(title))


def _words(*keys: str) -> tuple[Column, ...]:
    return tuple(Column(key, key, words=True) for key in keys)


def _minute(at: str) -> str:
    return at.replace("T", " ")[:16]
