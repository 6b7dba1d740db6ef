"""The log of moves: one record decides where aliases of a registered model point; the aliases follow it.

A record is one tag of the registered model, `move-000007`, and is written at once. Whoever is killed after that leaves aliases
that lag behind; the next command that reads them puts them where the log says. A record holds the sha256 of the one before,
who moved what, when and why, and under which gate policy; with `signing.key` it is signed. No later record vouches for the
last one: its own digest is a tag of every version that it points an alias at, written before it.

MLflow has no compare-and-swap. The lock covers every process on this host that uses the same store (with SQLite) or the same
work directory (with a server). Against other hosts there is only a check after the write, which reports a lost race.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from getpass import getuser
from pathlib import Path
from typing import Any, Protocol

from pipeline.artifacts.locks import locked
from pipeline.core.errors import GateRefusal, UserError
from pipeline.core.redaction import clip, redact_text
from pipeline.trust.history import PREFIX, SIGNED_AS, History, Kind, Record, bound_by, compact, digest, read_history
from pipeline.trust.keys import Keys

MOST_CHARS = 4900
"""Of a record: MLflow's column holds 5,000."""
WHY_CHARS = 400
PAST = {"promote": "promoted", "rollback": "rolled_back", "route": "routed", "policy": "bound"}
"""Kind of move -> how tags of a version name it."""


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

        The way back is `urgent` and waits for nobody: a log that cannot be trusted is then mended. Raises GateRefusal when the
        log cannot be trusted.
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
