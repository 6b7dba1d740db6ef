"""What the tracking store says of the engines of a work directory: versions, aliases, moves. Nothing in it changes.

MLflow's client is asked, which takes two seconds to import. Of a SQLite file the answer is kept until the file changes.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from pydantic import TypeAdapter

from pipeline.artifacts.digest import json_digest
from pipeline.artifacts.files import write_whole
from pipeline.core.cache import ForeignFolder, own_cache
from pipeline.registry.pages import told
from pipeline.registry.tracking import IDENTITY_TAG, Location, Version
from pipeline.trust.keys import Keys
from pipeline.trust.movelog import History, read_history


@dataclass(frozen=True)
class Model:
    """A registered model: its versions, and where its aliases point."""

    name: str
    tags: dict[str, str]
    versions: dict[str, Version]
    aliases: dict[str, str]

    @cached_property
    def history(self) -> History:
        """The log of moves, which decides where aliases belong."""
        return read_history(self.tags, Keys())

    @property
    def pointed_at(self) -> dict[str, Version]:
        """Alias -> version, as servers read it; where the log of moves has another, that is `ALIAS (log of moves)`."""
        logged = {
            f"{alias} (log of moves)": number
            for alias, number in self.history.aliases.items()
            if number is not None and number != self.aliases.get(alias)
        }
        every = {**self.aliases, **logged}
        return {alias: self.versions[number] for alias, number in every.items() if number in self.versions}


_KEPT = TypeAdapter(tuple[str, list[Model]])
SQLITE_HEADER = 100
"""Bytes that a file of SQLite begins with; among them a counter of its changes."""


def read_registered(location: Location, identities: Collection[str]) -> list[Model]:
    """Read the configured registered model, and each model of which a version cites an identity.

    Of a SQLite file that does not exist nothing is read, and none is made.
    """
    file = location.file
    if file is None:
        return _ask(location, identities)
    if not file.is_file() or not file.stat().st_size:
        return []
    # What changes with every change of the file: the counter in its header, and the log that some keep beside it.
    log = file.with_name(f"{file.name}-wal")
    with file.open("rb") as stream:
        state = stream.read(SQLITE_HEADER).hex(), log.stat().st_mtime_ns if log.is_file() else 0
    question = json_digest([state, sorted(identities), location.model_name])
    try:
        kept = own_cache("registered") / f"{json_digest(str(file))}.json"
    except (ForeignFolder, OSError):
        return _ask(location, identities)
    with suppress(OSError, ValueError):
        before, models = _KEPT.validate_json(kept.read_bytes())
        if before == question:
            return models
    models = _ask(location, identities)
    with suppress(OSError):
        write_whole(kept, _KEPT.dump_json((question, models)).decode())
    return models


def _ask(location: Location, identities: Collection[str]) -> list[Model]:
    from pipeline.registry.mlflow_client import Client, MlflowException, version_of

    client, models = Client(location), list[Model]()
    names = {location.model_name}
    for digest in identities:
        names |= {str(one.name) for one in client.search_model_versions(f"tags.{IDENTITY_TAG} = '{digest}'")}
    for name in sorted(names):
        with suppress(MlflowException):  # nothing was registered yet
            model = client.get_registered_model(name)
            found = client.search_model_versions(f"name = '{name}'")
            versions = {str(one.version): version_of(one) for one in found}
            aliases = {alias: str(number) for alias, number in model.aliases.items()}
            models.append(Model(name, told(model.tags), versions, aliases))
    return models
