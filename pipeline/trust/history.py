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
"""Of the tags of the registered model that hold the records: `move-000007`."""
NAME = re.compile(PREFIX + r"[0-9]{6}")
SIGNED_AS = "application/vnd.kvgate.move+json"
"""The type under which a record is signed."""
Kind = Literal["promote", "rollback", "route", "policy"]


class Record(StrictModel):
    """One move."""

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


class Entry(StrictModel):
    """A record with its signature, as a tag holds it."""

    record: Record
    signature: Signature | None


@dataclass(frozen=True)
class History:
    """The log as it was read."""

    records: tuple[Record, ...]
    last: str
    """sha256 of the last tag."""
    number: int
    """Of the last tag."""
    problem: str | None
    """Why it cannot be trusted; None when every record follows from the one before."""

    @property
    def aliases(self) -> dict[str, str | None]:
        """Where every alias of the log belongs. Records before one that mends the log no longer count."""
        start = max((place for place, record in enumerate(self.records) if record.mends is not None), default=0)
        return {alias: version for record in self.records[start:] for alias, version in record.aliases.items()}

    @property
    def rolled_back(self) -> dict[str, str]:
        """Digest of a report -> when the engine that it is about was rolled back, and not promoted since."""
        left: dict[str, str] = {}
        for record in self.records:
            for alias, version in record.aliases.items():
                before = record.before.get(alias)
                if alias != "champion" or version is None:
                    continue
                if record.kind == "promote":
                    left.pop(record.reports.get(version, ""), None)
                elif record.kind == "rollback" and before is not None:
                    left[record.reports.get(before, "")] = record.at
        return left

    @property
    def policy(self) -> str | None:
        """Digest of the gate policy that was set last; None where none ever was."""
        return next((record.policy for record in reversed(self.records) if record.kind == "policy"), None)


def read_history(model_tags: Mapping[str, str], keys: Keys) -> History:
    """Read the log from the tags of a registered model; what is wrong with it is part of the result."""
    tags = {name: text for name, text in model_tags.items() if NAME.fullmatch(name)}
    problem, prior, expected, records = None, "", 1, list[Record]()
    unsigned: str | None = None
    number = 0
    for name in sorted(tags):
        text, number = tags[name], int(name.removeprefix(PREFIX))
        try:
            record, signature = (entry := Entry.model_validate_json(text)).record, entry.signature
        except ValidationError:
            problem, prior, expected = problem or f"{name} cannot be read", text_digest(text), expected + 1
            continue
        if record.mends is not None and record.prior == prior:
            problem = None
        elif record.number != expected or name != tag_name(expected):
            problem = problem or f"move {expected} is missing"
        elif record.prior != prior:
            problem = problem or f"move {expected} does not follow from the one before: one of them was altered"
        records.append(record)
        prior, expected = text_digest(text), record.number + 1
        unsigned = keys.problem(SIGNED_AS, canonical(record), [signature] if signature is not None else [])
    if problem is None and unsigned is not None:  # the last one vouches for those that it follows from
        problem = f"move {records[-1].number}: {unsigned}"
    return History(tuple(records), prior, number, problem)


def tag_name(number: int) -> str:
    return f"{PREFIX}{number:06}"


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def canonical(record: Record) -> bytes:
    """Return the bytes of a record that are signed."""
    return json.dumps(written(record), sort_keys=True, separators=(",", ":")).encode()


def written(record: Record) -> dict[str, Any]:
    """Return what is written of a record. Defaults are left out: a later kvgate may have more fields."""
    return record.model_dump(exclude_defaults=True)
