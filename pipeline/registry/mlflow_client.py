"""MLflow's client. Importing MLflow takes 2 s: import this module and `mlflow_store` inside functions."""

import logging
import os
import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from alembic.util import CommandError
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.exceptions import MlflowException
from requests import RequestException
from sqlalchemy.exc import SQLAlchemyError

from pipeline.registry.reaching import PYTHONS, check_reachable, reached
from pipeline.registry.tracking import ENVIRONMENT, IDENTITY_TAG, Location, RegisteredModel, Version
from stages.core.errors import UserError, short

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
LOGGERS = ("alembic", "mlflow.store.db.utils", "mlflow.store.model_registry.abstract_store")
"""Loggers to silence: they log dozens of lines while a new file migrates, and the tracebacks of raised exceptions."""
ERRORS = (MlflowException, SQLAlchemyError, CommandError, RequestException, sqlite3.Error)
LATEST = 253_402_300_799
"""End of the year 9999, in seconds since 1970."""


ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Tables and columns of MLflow's database with the absolute address of a file or folder."""


class Client(MlflowClient):
    """MLflow's client. Every method runs within `reached`, which announces long waits and turns errors into one line."""

    def __init__(self, location: Location) -> None:
        """Open the store. For a database, create or check its tables; for a server, send one request."""
        check_reachable(location)
        for logger in LOGGERS:
            logging.getLogger(logger).setLevel(logging.CRITICAL)
        # MLflow reads its variable at every request, libpq at every connection.
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(1, round(location.timeout_s)))
        os.environ["PGCONNECT_TIMEOUT"] = str(max(2, round(location.timeout_s)))
        self._location = location
        retries = os.environ[RETRIES]
        os.environ[RETRIES] = "0"  # report a missing server at once
        try:
            with reached(location, *ERRORS, *PYTHONS):
                super().__init__(tracking_uri=location.uri, registry_uri=location.uri)
                _follow_move(location)
                if location.served:
                    self.search_experiments(max_results=1)
        finally:
            os.environ[RETRIES] = retries

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or not callable(value):
            return value
        location: Location = super().__getattribute__("_location")

        @wraps(value)
        def call(*arguments: Any, **options: Any) -> Any:
            with reached(location, *ERRORS, *PYTHONS):
                return value(*arguments, **options)

        return call

    def model(self, name: str) -> RegisteredModel:
        """Return a registered model. Raises MlflowException if it does not exist."""
        model = self.get_registered_model(name)  # search_model_versions returns versions without their aliases
        versions = {str(one.version): version_of(one) for one in self.search_model_versions(f"name = '{name}'")}
        aliases = {str(alias): str(number) for alias, number in model.aliases.items()}
        return RegisteredModel(name, versions, aliases, {str(key): str(text) for key, text in model.tags.items()})

    def engine_digest(self, version: Version) -> str | None:
        """Return the digest of a version's engine, from the run that judged it; None if the run was deleted."""
        with suppress(MlflowException):
            return str(self.get_run(version.run_id).data.tags.get("engine_digest"))
        return None

    def registered(self, identities: Collection[str]) -> list[RegisteredModel]:
        """Return the configured registered model, and each model with a version that cites a given identity."""
        models = dict[str, RegisteredModel]()

        def read(name: str) -> None:
            with suppress(MlflowException):  # nothing was registered yet
                model = self.model(name)
                unknown = [one for one in model.pointed_at.values() if one.run_id and one.identity_digest not in identities]
                models[name] = replace(model, engines={one.number: self.engine_digest(one) for one in unknown})

        read(self._location.model_name)
        for digest in sorted(identities):
            if not any(digest == version.identity_digest for model in models.values() for version in model.versions.values()):
                for name in {str(found.name) for found in self.search_model_versions(f"tags.{IDENTITY_TAG} = '{digest}'")}:
                    read(name)
        return [models[name] for name in sorted(models)]

    def aliased(self, names: Sequence[str], alias: str) -> Version | None:
        """Return the version with an alias, from the first model in `names` that has this alias; None if no model has it."""
        for name in names:
            with suppress(MlflowException):  # the model does not exist
                number = self.get_registered_model(name).aliases.get(alias)
                if number is not None:
                    return version_of(self.get_model_version(name, str(number)))
        return None

    def download(self, version: Version, folder: Path) -> Path:
        """Download the evidence of a version, with the engine if the registry has a copy; return the path."""
        return Path(download_artifacts(version.source, dst_path=str(folder), tracking_uri=self._location.uri))


def path_of(address: str) -> Path:
    return Path(unquote(urlsplit(address).path))


def _follow_move(location: Location) -> None:
    """Correct the absolute addresses in a SQLite store that was moved with its work directory."""
    new = location.artifact_root
    if location.file is None or new is None or path_of(new).parent != location.file.parent or not path_of(new).is_dir():
        return
    with closing(sqlite3.connect(location.file, timeout=location.timeout_s)) as store, store:
        query = "SELECT artifact_location FROM experiments WHERE name = ?"
        for (old,) in store.execute(query, [location.experiment]).fetchall():
            before = path_of(old)
            if before.name != path_of(new).name or before.exists() or before.with_name(location.file.name).exists():
                continue  # the store was not moved, or is a copy, or its files are elsewhere on purpose
            for table, column in ADDRESSES:
                moved = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column} || '/', 1, ?) = ?"
                store.execute(moved, [new, len(old) + 1, len(old) + 1, f"{old}/"])


def version_of(found: Any) -> Version:
    """Convert MLflow's version to a `Version`. Raises UserError if its creation time is invalid."""
    made, tags = found.creation_timestamp, {str(key): str(value) for key, value in found.tags.items()}
    if not isinstance(made, int) or not 0 <= made / 1000 <= LATEST:
        where = f"version {found.version} of {found.name} in MLflow's store (tracking.uri or {ENVIRONMENT})"
        raise UserError(f"{where}: creation_timestamp={short(made)} is no time; correct it there, or name another store")
    return Version(str(found.version), tags, str(found.run_id or ""), made / 1000, str(found.source or ""))
