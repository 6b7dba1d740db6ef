"""What the tracking store says of the engines of a work directory: versions, aliases, moves. Nothing in it changes.

A store in SQLite is read without MLflow, which takes seconds to import; MLflow's client asks servers and other databases.
"""

import sqlite3
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import quote

from pipeline.core.errors import UserError
from pipeline.registry.reaching import check_reachable, named
from pipeline.registry.tracking import Location
from pipeline.trust.history import History, read_history
from pipeline.trust.keys import Keys

IDENTITY_TAG = "identity_digest"


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    number: str
    tags: Mapping[str, str]
    made: float
    """When it was registered, in seconds since 1970."""

    @property
    def identity_digest(self) -> str:
        """sha256 of the identity.json that it cites."""
        return self.tags.get(IDENTITY_TAG, "")

    @property
    def engine(self) -> str:
        """Display name of its engine."""
        return self.tags.get("kv", "no name")


@dataclass(frozen=True)
class Model:
    """A registered model: its versions, and where its aliases point."""

    name: str
    versions: Mapping[str, Version]
    """By number."""
    aliases: Mapping[str, str]
    """Alias -> version, as the registry has it."""
    history: History
    """The log of moves, which decides where aliases belong."""

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


def read_registered(location: Location, identities: Collection[str]) -> list[Model]:
    """Read the configured registered model, and each model of which a version cites an identity.

    Args:
        location: The store. Of a SQLite file that does not exist nothing is read, and none is made.
        identities: sha256 of identities that lie in the work directory.

    Raises:
        UserError, MissingRequirement: when the store cannot be read.
    """
    if location.file is None:
        return sorted(_from_client(location, identities), key=lambda model: model.name)
    if not location.file.is_file():
        return []
    check_reachable(location)
    try:
        database = sqlite3.connect(f"file:{quote(str(location.file))}?mode=ro", uri=True, timeout=location.timeout_s)
        with closing(database):
            return _from_tables(database, {location.model_name}, identities)
    except sqlite3.Error as error:
        raise UserError(f"{named(location)} cannot be read: {error}; run a stage that tracks, which upgrades it") from error


def _from_tables(database: sqlite3.Connection, names: set[str], identities: Collection[str]) -> list[Model]:
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'registered_models'").fetchone():
        return []
    tags: dict[tuple[str, str], dict[str, str]] = {}
    for name, number, key, value in database.execute("SELECT name, version, key, value FROM model_version_tags"):
        tags.setdefault((name, str(number)), {})[key] = value
    names = names | {name for (name, _), of in tags.items() if of.get(IDENTITY_TAG) in identities}
    found = []
    for (name,) in database.execute("SELECT name FROM registered_models ORDER BY name").fetchall():
        if name in names:
            of_model = database.execute("SELECT key, value FROM registered_model_tags WHERE name = ?", (name,))
            aliases = database.execute("SELECT alias, version FROM registered_model_aliases WHERE name = ?", (name,))
            versions = database.execute(
                "SELECT version, creation_time FROM model_versions WHERE name = ? AND current_stage != 'Deleted_Internal'",
                (name,),
            )
            made = [Version(str(number), tags.get((name, str(number)), {}), at / 1000) for number, at in versions]
            found.append(_model(name, dict(of_model), dict(aliases), made))
    return found


def _from_client(location: Location, identities: Collection[str]) -> Iterable[Model]:
    from pipeline.registry.mlflow_client import Client, MlflowException

    client = Client(location)
    names = {location.model_name}
    for digest in identities:
        names |= {str(one.name) for one in client.search_model_versions(f"tags.{IDENTITY_TAG} = '{digest}'")}
    for name in names:
        try:
            model = client.get_registered_model(name)
        except MlflowException:  # nothing was registered yet
            continue
        versions = client.search_model_versions(f"name = '{name}'")
        made = [Version(str(one.version), one.tags, one.creation_timestamp / 1000) for one in versions]
        yield _model(name, model.tags, model.aliases, made)


def _model(name: str, tags: Mapping[str, str], aliases: Mapping[str, object], versions: Iterable[Version]) -> Model:
    by_number = {one.number: one for one in versions}
    return Model(name, by_number, {alias: str(number) for alias, number in aliases.items()}, read_history(tags, Keys()))
