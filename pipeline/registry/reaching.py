"""Whether a tracking store can be used: asked before MLflow is, which tries for minutes and answers with tracebacks."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from pipeline.artifacts.locks import announced, until
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.redaction import redact_text
from pipeline.registry.tracking import ENVIRONMENT, Location

SQLITE = "sqlite:///"
HEADER = b"SQLite format 3\0"

QUIET_S = 5.0
"""Seconds of a wait before anything is said of it: making the tables of a fresh store takes some."""

DRIVERS = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}
"""Modules of drivers, and the distributions that have them, where those are called otherwise. A release of SQLAlchemy decides
which one `postgresql://` takes; `postgresql+psycopg2://` says it."""


def named(location: Location) -> str:
    """Return the store in words, without its password."""
    return f"MLflow's store {redact_text(location.uri)} (tracking.uri or {ENVIRONMENT})"


@contextmanager
def patient(location: Location) -> Iterator[None]:
    """Say of a wait for the store that goes on for more than a moment how long it may take."""
    limit = location.timeout_s
    end = until(limit)
    with announced(lambda: f"{named(location)}; a request may take until {end} (tracking.timeout_s={limit:g})", QUIET_S):
        yield


def check_reachable(location: Location) -> None:
    """Refuse a store that cannot be opened. A server is not asked: MLflow's own first request shows what it says.

    Raises:
        UserError: for a file that is no database, and for what a database refuses.
        MissingRequirement: for a driver that is not installed, a database that does not answer, or one that is locked.
    """
    if location.uri.startswith(SQLITE):
        with patient(location):
            _check_file(location, Path(location.uri.removeprefix(SQLITE)))
    elif not location.served:
        with patient(location):
            _check_database(location)


def _check_file(location: Location, path: Path) -> None:
    with _translated(location):
        if path.is_dir():
            raise UserError(f"{named(location)} cannot be used: it is a directory; give sqlite:///FILE")
        with path.open("rb") if path.exists() else open(os.devnull, "rb") as stream:
            header = stream.read(len(HEADER))
        if header and header != HEADER:
            raise UserError(f"{named(location)} cannot be used: the file is no SQLite database; name another, or remove it")
        path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(f"file:{quote(str(path))}", uri=True, timeout=location.timeout_s, isolation_level=None)
        with closing(database):
            database.execute("BEGIN IMMEDIATE")
            database.execute("PRAGMA schema_version").fetchall()
            database.execute("ROLLBACK")


@contextmanager
def _translated(location: Location) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{named(location)} cannot be used: {error.strerror}; name another") from error
    except sqlite3.Error as error:
        if "locked" in str(error):
            raise MissingRequirement(
                f"{named(location)} cannot be used: another process kept it locked for tracking.timeout_s="
                f"{location.timeout_s:g}; end that one, or give it longer"
            ) from error
        raise UserError(f"{named(location)} cannot be used: {error}; repair the file, or name another") from error


def _check_database(location: Location) -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

    kind = location.uri.partition(":")[0]
    try:
        key = "timeout" if kind.startswith("mssql") else "connect_timeout"
        engine = create_engine(location.uri, connect_args={key: max(2, round(location.timeout_s))})
        try:
            engine.connect().close()
        finally:
            engine.dispose()
    except (NoSuchModuleError, ArgumentError, ValueError) as error:
        raise UserError(f"{named(location)} cannot be used: {_first_line(error)}; give a URI of SQLAlchemy") from error
    except ModuleNotFoundError as error:
        driver = DRIVERS.get(str(error.name), error.name)
        raise MissingRequirement(
            f"{named(location)} takes a driver that is not installed: {error.name}; pip install {driver}"
        ) from error
    except DBAPIError as error:
        raise MissingRequirement(f"{named(location)} does not let us in: {_first_line(error.orig or error)}") from error


ANSWERS = (
    (
        ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"),
        UserError,
        "refuses these credentials (401); set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    ),
    (("PERMISSION_DENIED",), UserError, "does not permit this (403); use an account that may write there"),
    (
        ("ENDPOINT_NOT_FOUND", "not in a valid JSON format"),
        UserError,
        "answers, but not as a server of MLflow does; give the root of one",
    ),
    (
        ("timed out", "timeout exception"),
        MissingRequirement,
        "did not answer within tracking.timeout_s={limit:g}; look at the server, or give it longer",
    ),
    (("error responses",), MissingRequirement, "answers with an error of its own (5xx); look at its log"),
    (("Invalid url",), UserError, "is no address: special characters of a password are percent-encoded there (/ is %2F)"),
    (("API request to http",), MissingRequirement, "is not there: no server answers; start it, or name another"),
    (
        ("database is locked",),
        MissingRequirement,
        "stayed locked by another process for tracking.timeout_s={limit:g}; end that one, or give it longer",
    ),
    (
        ("out-of-date database schema", "Can't locate revision"),
        UserError,
        "is of another release of MLflow; back it up and run `mlflow db upgrade` with the newest that used it, or name another",
    ),
)
"""What MLflow's errors contain, or their codes are, and what to say of them."""


def problem(location: Location, error: Exception) -> Exception:
    """Return what to raise for an error of MLflow's client: one line, without secrets, that says what to do."""
    text = f"{getattr(error, 'error_code', '')}: {error}"
    for signs, kind, words in ANSWERS:
        if any(sign in text for sign in signs):
            return kind(f"{named(location)} {words.format(limit=location.timeout_s)}")
    return MissingRequirement(f"{named(location)} failed: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    """Return the line of an error's text that says what happened: of SQLAlchemy's the one with the driver's own error."""
    lines = redact_text(str(error)).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if line.startswith("(") and "Error) " in line), lines[0]).strip()
