"""The log of moves: one record decides where aliases of a registered model point; the aliases follow it.

A record is one tag of the registered model, `move-000007`, and is written at once. Whoever is killed after that leaves aliases
that lag behind; the next command that reads them puts them where the log says. A record holds the sha256 of the one before,
who moved what, when and why, and under which gate policy; with `signing.key` it is signed. No later record vouches for the
last one: its own digest is a tag of every version that it points an alias at, written before it.

MLflow has no compare-and-swap. The lock covers every process on this host that uses the same store (with SQLite) or the same
work directory (with a server). Against other hosts there is only a check after the write, which reports a lost race.
"""

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from getpass import getuser
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, ValidationError

from pipeline.artifacts.locks import locked
from pipeline.core.errors import GateRefusal, UserError
from pipeline.core.redaction import clip, redact_text
from pipeline.core.strict import StrictModel
from pipeline.trust.keys import Keys, Signature

PREFIX = "move-"
SIGNED_AS = "application/vnd.kvgate.move+json"
"""The type under which a record is signed."""
MOST_CHARS = 4900
"""Of a record: MLflow's column holds 5,000."""
WHY_CHARS = 400
PAST = {"promote": "promoted", "rollback": "rolled_back", "route": "routed", "policy": "bound"}
"""Kind of move -> how tags of a version name it."""
Kind = Literal["promote", "rollback", "route", "policy"]


class Record(StrictModel):
    number: int
    prior: str
    """sha256 of the record before, as its tag holds it; empty for the first."""
    kind: Kind
    at: str
    by: str
    why: str
    policy: str | None
    """Digest of the gate policy that was kept to."""
    aliases: dict[str, str | None] = Field(default={})
    """Alias -> the version that it points at from now on; None: it is gone."""
    before: dict[str, str | None] = Field(default={})
    """The same aliases -> where they pointed until then."""
    reports: dict[str, str] = Field(default={})
    """Version -> digest of the report that it was moved on, or left with."""
    tags: dict[str, dict[str, str]] = Field(default={})
    """Version -> what its tags say of this move."""
    mends: str | None = None
    """Why the log before this record could not be trusted; whoever wrote it was told, and went on."""

    @property
    def versions(self) -> set[str]:
        return {version for version in self.aliases.values() if version is not None}

    def written(self) -> dict[str, Any]:
        """Return what is written of it. Defaults are left out: a later kvgate may have more fields."""
        return self.model_dump(exclude_defaults=True)

    def signed(self) -> bytes:
        return compact(self.written()).encode()


class Entry(StrictModel):
    """A record with its signature, as a tag holds it."""

    record: Record
    signature: Signature | None


@dataclass(frozen=True)
class History:
    records: tuple[Record, ...]
    last: str
    number: int
    problem: str | None
    """Why it cannot be trusted; None when every record follows from the one before."""

    @property
    def aliases(self) -> dict[str, str | None]:
        """Where every alias of the log belongs. Records before one that mends the log no longer count."""
        start = max((place for place, record in enumerate(self.records) if record.mends is not None), default=0)
        return {alias: version for record in self.records[start:] for alias, version in record.aliases.items()}

    def rolled_back(self, alias: str) -> dict[str, str]:
        """Return digest of a report -> when a rollback left the engine that it is about, and nobody chose it since."""
        left: dict[str, str] = {}
        for record in self.records:
            version = record.aliases.get(alias)
            if version is None:
                continue
            if record.kind == "rollback":
                left[record.reports.get(record.before.get(alias) or "", "")] = record.at
            else:
                left.pop(record.reports.get(version, ""), None)
        return left

    def chosen(self, *aliases: str) -> set[str]:
        """Return the versions that one of these aliases was pointed at, other than by a rollback: they were proven then."""
        moves = [record.aliases.get(alias) for record in self.records if record.kind != "rollback" for alias in aliases]
        return {version for version in moves if version is not None}

    @property
    def policy(self) -> str | None:
        """Digest of the gate policy that was set last; None where none ever was."""
        return next((record.policy for record in reversed(self.records) if record.kind == "policy"), None)


def read_history(model_tags: Mapping[str, str], keys: Keys) -> History:
    """Read the log from the tags of a registered model; what is wrong with it is part of the result."""
    problem, prior, number, expected, records = None, "", 0, 1, list[Record]()
    unsigned: str | None = None
    for name in sorted(name for name in model_tags if re.fullmatch(PREFIX + "[0-9]{6}", name)):
        text, number = model_tags[name], int(name.removeprefix(PREFIX))
        try:
            entry = Entry.model_validate_json(text)
        except ValidationError:
            problem, prior, expected = problem or f"{name} cannot be read", digest(text), expected + 1
            continue
        record = entry.record
        if record.mends is not None and record.prior == prior:
            problem = None
        elif not record.number == number == expected:
            problem = problem or f"move {expected} is missing"
        elif record.prior != prior:
            problem = problem or f"move {expected} does not follow from the one before: one of them was altered"
        records.append(record)
        prior, expected = digest(text), record.number + 1
        unsigned = keys.problem(SIGNED_AS, record.signed(), [entry.signature] if entry.signature is not None else [])
    if problem is None and unsigned is not None:  # the last one vouches for those that it follows from
        problem = f"move {records[-1].number}: {unsigned}"
    return History(tuple(records), prior, number, problem)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def bound_by(record: str) -> str:
    """Return the tag that binds the record with this digest to what it moves, and is written before the record."""
    return f"moved-by-{record[:16]}"


def compact(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


class Registry(Protocol):
    """Versions of one registered model, their tags, those of the model, and the aliases that point at versions."""

    lock: Path

    def alias(self, alias: str) -> str | None: ...
    def set_alias(self, alias: str, version: str) -> None: ...
    def delete_alias(self, alias: str) -> None: ...
    def tags(self, version: str) -> dict[str, str] | None:
        """Return the tags of a version; None when there is no such version."""
        ...

    def set_tags(self, version: str, tags: Mapping[str, str]) -> None: ...
    def model_tags(self) -> dict[str, str]: ...
    def set_model_tag(self, name: str, text: str) -> None: ...


def _silent(_line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class MoveLog:
    """The log of a registered model, and how this command writes to it."""

    registry: Registry
    keys: Keys = field(default_factory=Keys)
    accept_broken: bool = False
    """`promote.accept_broken_log`: whether a log that cannot be trusted may be continued."""
    say: Callable[[str], None] = _silent
    """Told of what was repaired."""

    def read(self) -> History:
        tags = self.registry.model_tags()
        history = read_history(tags, self.keys)
        if history.problem is not None or not history.records:
            return history
        record = history.records[-1]
        holders = {f"version {version}": self.registry.tags(version) for version in sorted(record.versions)}
        for holder, held in (holders or {"the registered model": tags}).items():
            if held is not None and bound_by(history.last) not in held:  # None: somebody deleted the version
                said = f"move {record.number}: {holder} does not hold its digest: it was altered, or an older kvgate wrote it"
                return replace(history, problem=said)
        return history

    @contextmanager
    def changing(self, *, urgent: bool = False) -> Iterator[History]:
        """Hold the lock while the block runs, with aliases that are where the log says.

        The way back is `urgent` and waits for nobody: a log that cannot be trusted is then mended.
        """
        with locked(self.registry.lock, "the log of moves"):
            history = self._repaired()
            if history.problem is not None and not (self.accept_broken or urgent):
                raise GateRefusal(
                    f"the log of moves cannot be trusted: {history.problem}; look at the tags {PREFIX}* of the registered "
                    "model, then go on from what the aliases say with promote.accept_broken_log=true"
                )
            yield history

    def repair(self) -> None:
        """Put aliases where the log says, for a command that only reads them. A log that cannot be trusted moves nothing."""
        with locked(self.registry.lock, "the log of moves"):
            self._repaired()

    def _repaired(self) -> History:
        history = self.read()
        if history.problem is not None:
            self.say(f"the log of moves cannot be trusted: {history.problem}")
        self._follow(history, self.say)
        return history

    def append(self, history: History, kind: Kind, why: str, **of: Any) -> None:
        """Write the record of a move, which decides, and let the aliases follow; call it inside `changing`.

        `of` are other fields of `Record`. Raises GateRefusal when another host wrote at the same time.
        """
        record = Record(
            number=history.number + 1,
            prior=history.last,
            kind=kind,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            by=mover(),
            why=clip(redact_text(why), WHY_CHARS),
            policy=of.pop("policy", history.policy),
            mends=history.problem,
            **of,
        )
        signature = self.keys.sign(SIGNED_AS, record.signed())
        signed = signature.model_dump() if signature is not None else None
        name, text = f"{PREFIX}{record.number:06}", compact({"record": record.written(), "signature": signed})
        if len(text) > MOST_CHARS:
            raise UserError(f"one command moves too much: its record has {len(text):,} characters of {MOST_CHARS:,}; use two")
        bound = {bound_by(digest(text)): name}
        for version in sorted(record.versions):
            if self.registry.tags(version) is not None:
                self.registry.set_tags(version, bound)
        if not record.versions:
            self.registry.set_model_tag(*bound.popitem())
        self.registry.set_model_tag(name, text)
        if self.registry.model_tags().get(name) != text:
            raise GateRefusal(f"another host moved the aliases meanwhile: move {record.number} is not ours; do it again")
        self._follow(self.read(), _silent)

    def _follow(self, history: History, say: Callable[[str], None]) -> None:
        """Put aliases where a log says that can be trusted, and the tags of the last move's versions."""
        if history.problem is not None:
            return
        for alias, version in sorted(history.aliases.items(), key=_order):
            found = self.registry.alias(alias)
            if found == version:
                continue
            if version is not None and self.registry.tags(version) is None:
                self.say(f"version {version}, where the log of moves has the alias {alias}, was deleted from the registry")
                continue
            where = "nowhere" if found is None else f"at version {found}"
            there = "is gone" if version is None else f"points at version {version}"
            say(f"the alias {alias} was {where}: as the log of moves has it, it {there}")
            if version is None:
                self.registry.delete_alias(alias)
            else:
                self.registry.set_alias(alias, version)
        for version, tags in tags_of(history.records[-1]).items() if history.records else ():
            present = self.registry.tags(version)
            if present is not None and not tags.items() <= present.items():
                self.registry.set_tags(version, tags)


def _order(target: tuple[str, str | None]) -> tuple[bool, bool, str]:
    """Ways back are set before what serves, and nothing is removed before everything is set."""
    alias, version = target
    return version is None, not alias.endswith(("previous", "fallback")), alias


def tags_of(record: Record) -> dict[str, dict[str, str]]:
    past = PAST[record.kind]
    said = {f"{past}_at": record.at, f"{past}_by": record.by, f"{past}_under": record.policy or "no gate policy"}
    return {version: {**tags, **said} for version, tags in record.tags.items()}


def mover(environ: Mapping[str, str] = os.environ) -> str:
    """Return who moves: the address of the CI run (of GitHub, GitLab or Jenkins), or user and host."""
    github = [environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")]
    run = "{}/{}/actions/runs/{}".format(*github) if all(github) else environ.get("CI_JOB_URL") or environ.get("BUILD_URL")
    if run:
        return redact_text(run)
    try:
        user = getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
