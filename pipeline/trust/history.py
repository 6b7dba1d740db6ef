"""The log of moves as it is read: records of who moved which alias, each holding the digest of the one before."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError

from pipeline.core.strict import StrictModel
from pipeline.trust.keys import Keys, Signature

PREFIX = "move-"
SIGNED_AS = "application/vnd.kvgate.move+json"
"""The type under which a record is signed."""
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
