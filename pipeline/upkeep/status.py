"""`stage=status`: what serves, what was judged, what lies on the disk, and what of it is out of date. Nothing is written."""

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from pipeline.core.strict import StrictModel
from pipeline.registry.summary import Candidate
from pipeline.terminal.next_steps import Step
from pipeline.upkeep.disk import Disk, by_kind, distinct_bytes, freed_bytes
from pipeline.upkeep.needs import Evidence, Needs, Sweep
from pipeline.upkeep.prune import in_use_by
from pipeline.upkeep.registered import Model, Registered, Version
from pipeline.upkeep.stale import Stale, stale

SCHEMA_VERSION: Final = 1
KINDS = (
    "build",
    "identity",
    "evaluate",
    "baseline",
    "round",
    "once",
    "encode",
    "quantize",
    "exports",
    "export",
    "calibration",
    "checkpoint",
)
"""The order in which kinds of artifacts are listed; others follow."""


class Alias(StrictModel):
    """An engine that an alias of a registered model points at."""

    alias: str
    """`champion`, `previous`, `candidate`, `route-...`."""
    version: str
    name: str
    """Its display name: the policy, and what else the command line changed."""
    verdict: str
    covered: str | None
    """How far the verdict holds: `up to 1,024 tokens, batch 16`."""
    registered_at: str
    registered_age_s: float
    moved_at: str | None
    """When the log of moves put the alias there; null where it did not."""
    moved_by: str | None
    moved_why: str | None
    in_place_of: str | None
    """Which version was there until that move; null where none was."""
    evidence: str | None
    """Place of its identity in the store; null where it is not in this work directory."""


class RegisteredModel(StrictModel):
    """A registered model with its aliases, the champion first."""

    name: str
    versions: int
    aliases: tuple[Alias, ...]
    log_problem: str | None
    """Why its log of moves cannot be trusted; null where it can."""


class Judged(StrictModel):
    """A candidate of a sweep."""

    name: str
    policy: str
    model: str
    backend: str
    verdict: str
    covered: str | None
    reason: str | None
    """The first of its verdict's reasons."""
    version: str | None
    """Of the registered model; null without tracking."""
    evidence: str | None
    """Place of its identity in the store; null where it is gone."""


class SweepStatus(StrictModel):
    """A sweep, or a single evaluation."""

    sweep: str
    began_at: str
    age_s: float
    unfinished: str | None
    """How much of it is missing; null where it ended."""
    candidates: tuple[Judged, ...]


class Kind(StrictModel):
    """What lies in the store of one kind."""

    kind: str
    """A stage, or `unfinished`, `scratch` and `pool`."""
    count: int
    size_bytes: int
    """Files that several of them share are counted once."""
    alone_bytes: int
    """Of these, what no other kind shares."""


class Status(StrictModel):
    """`stage=status --json`."""

    schema_version: Literal[1]
    at: str
    workdir: str
    models: tuple[RegisteredModel, ...]
    sweeps: tuple[SweepStatus, ...]
    """The last ones, the latest first."""
    sweeps_in_all: int
    kinds: tuple[Kind, ...]
    store_bytes: int
    """Of everything in the store; a file counts once, however many artifacts link to it."""
    beside_bytes: dict[str, int]
    """What else lies in the work directory: name -> bytes."""
    in_use: str | None
    """Which processes use the artifacts; null where this machine sees none."""
    stale: tuple[Stale, ...]
    problems: tuple[str, ...]
    """What could not be read, a line each."""
    next: tuple[Step, ...]
    """What to do next."""


def make_status(
    work: Path,
    disk: Disk,
    evidence: Evidence,
    registered: Registered,
    sweeps: Sequence[Sweep],
    needs: Needs,
    *,
    shown: int,
    problems: Sequence[str],
    now: float | None = None,
) -> Status:
    """Return the status of a work directory, without what to do next.

    Args:
        work: The work directory.
        disk: Its store.
        evidence: The identities in it.
        registered: What the tracking store knows.
        sweeps: All, the latest first.
        needs: Of the store.
        shown: How many sweeps are listed.
        problems: What could not be read.
        now: The time, in seconds since 1970.
    """
    now = time.time() if now is None else now
    judged = {candidate.identity.digest: candidate for sweep in sweeps for candidate in sweep.summary.candidates}
    return Status(
        schema_version=SCHEMA_VERSION,
        at=_time(now),
        workdir=str(work),
        models=tuple(_model(model, evidence, judged, now) for model in registered.models),
        sweeps=tuple(_sweep(sweep, evidence, now) for sweep in sweeps[:shown]),
        sweeps_in_all=len(sweeps),
        kinds=tuple(_kinds(disk)),
        store_bytes=distinct_bytes(disk.pieces),
        beside_bytes=_beside(work),
        in_use=in_use_by(disk.root),
        stale=tuple(stale(disk, evidence, registered, needs)),
        problems=(*problems, *evidence.unreadable),
        next=(),
    )


def _model(model: Model, evidence: Evidence, judged: dict[str, Candidate], now: float) -> RegisteredModel:
    order = {"champion": 0, "previous": 1}
    listed = sorted(
        model.pointed_at.items(), key=lambda item: (order.get(item[0], 3 if item[0] == "candidate" else 2), item[0])
    )
    aliases = tuple(_alias(model, alias, version, evidence, judged, now) for alias, version in listed)
    return RegisteredModel(name=model.name, versions=len(model.versions), aliases=aliases, log_problem=model.history.problem)


def _alias(model: Model, alias: str, version: Version, evidence: Evidence, judged: dict[str, Candidate], now: float) -> Alias:
    moves = [record for record in model.history.records if record.aliases.get(alias) == version.number]
    last = moves[-1] if moves else None
    before = model.versions.get(last.before.get(alias) or "") if last is not None else None
    tags, candidate = version.tags, judged.get(version.identity_digest)
    covered = candidate.covered if candidate is not None else None
    if covered is None and "max_tokens" in tags:
        covered = f"up to {tags['max_tokens']} tokens, batch {tags.get('max_batch', '?')}"
    return Alias(
        alias=alias,
        version=version.number,
        name=tags.get("kv", "no name"),
        verdict=tags.get("verdict", "unknown"),
        covered=covered,
        registered_at=_time(version.made),
        registered_age_s=now - version.made,
        moved_at=last.at if last is not None else None,
        moved_by=last.by if last is not None else None,
        moved_why=last.why if last is not None else None,
        in_place_of=f"version {before.number} ({before.tags.get('kv', 'no name')})" if before is not None else None,
        evidence=_place(evidence, version.identity_digest),
    )


def _sweep(sweep: Sweep, evidence: Evidence, now: float) -> SweepStatus:
    return SweepStatus(
        sweep=sweep.name,
        began_at=_time(sweep.began),
        age_s=now - sweep.began,
        unfinished=sweep.summary.unfinished,
        candidates=tuple(
            Judged(
                name=one.name,
                policy=one.policy,
                model=one.model,
                backend=one.backend,
                verdict=one.verdict,
                covered=one.covered,
                reason=one.reasons[0] if one.reasons else None,
                version=one.registration.model_version if one.registration is not None else None,
                evidence=_place(evidence, one.identity.digest),
            )
            for one in sweep.summary.candidates
        ),
    )


def _place(evidence: Evidence, digest: str) -> str | None:
    found = evidence.identities.get(digest)
    return found[1][0] if found is not None else None


def _kinds(disk: Disk) -> list[Kind]:
    found = by_kind(disk.pieces)
    order = {kind: number for number, kind in enumerate(KINDS)}
    return [
        Kind(kind=kind, count=len(pieces), size_bytes=distinct_bytes(pieces), alone_bytes=freed_bytes(pieces))
        for kind, pieces in sorted(found.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))
    ]


def _beside(work: Path) -> dict[str, int]:
    """Return the bytes of what lies beside the store."""
    found = {}
    for path in sorted(work.iterdir()) if work.is_dir() else ():
        if path.name == "artifacts":
            continue
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
        size = sum(file.lstat().st_size for file in files if file.is_file())
        if size:
            found[path.name] = size
    return found


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
