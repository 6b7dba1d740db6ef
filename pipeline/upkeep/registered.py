"""Read the registered models of a tracking store: versions and aliases. Nothing in the store changes.

A SQLite file is read directly, since importing MLflow takes two seconds.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.registry.reaching import reached
from pipeline.registry.tracking import IDENTITY_TAG, Location, Version


@dataclass(frozen=True)
class Model:
    """A registered model: its versions, and where its aliases point."""

    name: str
    versions: dict[str, Version]
    aliases: dict[str, str]

    @property
    def pointed_at(self) -> dict[str, Version]:
        """Alias -> version, as servers read it. A version that was deleted from the store has no tags."""
        return {alias: self.versions.get(number, Version(number, {})) for alias, number in self.aliases.items()}


def read_registered(location: Location, identities: Collection[str]) -> list[Model]:
    """Read the configured registered model, and each model of which a version cites an identity.

    Of a SQLite file that does not exist nothing is read, and none is made.
    """
    file = location.file
    if file is None:
        return _ask(location, identities)
    if not file.is_file() or not file.stat().st_size:
        return []
    with reached(location, sqlite3.Error):
        models = _of_file(file, location.timeout_s)
    cited = {model.name for model in models for one in model.versions.values() if one.identity_digest in identities}
    return [model for model in models if model.name in {*cited, location.model_name}]


def _of_file(file: Path, timeout_s: float) -> list[Model]:
    """Read MLflow's tables. Only with mode=rw can SQLite undo what a killed process had half written."""
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", timeout_s, isolation_level=None, uri=True)) as store:
        store.execute("BEGIN")  # all tables are read in one state
        models = {name: Model(name, {}, {}) for (name,) in store.execute("SELECT name FROM registered_models ORDER BY name")}
        for name, alias, number in store.execute("SELECT name, alias, version FROM registered_model_aliases"):
            models[name].aliases[alias] = str(number)
        tags = defaultdict[tuple[str, int], dict[str, str]](dict)
        for name, number, key, value in store.execute("SELECT name, version, key, value FROM model_version_tags"):
            tags[name, number][key] = str(value)
        versions = "SELECT name, version, run_id, CAST(creation_time AS REAL) FROM model_versions WHERE current_stage IS NOT ?"
        for name, number, run, made in store.execute(versions, ["Deleted_Internal"]):
            models[name].versions[str(number)] = Version(str(number), tags[name, number], run or "", (made or 0.0) / 1000)
    return list(models.values())


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
            models.append(Model(name, versions, aliases))
    return models
