"""Checks that a tracking store can be used, and translation of its errors into one line. Does not import MLflow.

Databases are checked before MLflow opens them, because MLflow retries for minutes and fails with tracebacks. MLflow's database
holds the absolute addresses of its files, which are corrected if the store was moved. A copy is refused.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.registry.tracking import Location
from pipeline.store.locks import announced
from stages.core.errors import MACHINE_ERRORS, MissingRequirement, Refusal, UserError, short
from stages.core.redaction import redact_text

QUIET_S = 5.0
"""Seconds before a wait is announced; creating the tables of a new store already takes some seconds."""
DRIVERS = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}
"""Module of a database driver -> its distribution, if the names differ."""
MLFLOWS = ("alembic_version", "experiments", "registered_models")
"""Tables of MLflow; an interrupted first command may have created only some."""
HANDLED = ("RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS")
"""Codes of MLflow's errors that are raised unchanged, because callers handle them."""
BAD_INPUT = {
    "refuses these credentials (401); set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN": (
        "UNAUTHENTICATED",
        "CUSTOMER_UNAUTHORIZED",
    ),
    "does not answer to this host name (403); start it with --allowed-hosts and the name, or give a name that it allows": (
        "Invalid Host header",
    ),
    "does not permit this (403); use an account that may write there": ("PERMISSION_DENIED",),
    "is not an MLflow server; give a server's root URL": (
        *("ENDPOINT_NOT_FOUND", "not in a valid JSON format", "redirects", "error code 3"),
    ),
    "is not an address; percent-encode the special characters of its password (/ is %2F)": ("Invalid url",),
    "has the schema of another MLflow version; back it up and run `mlflow db upgrade` of the newest version that used it": (
        *("out-of-date database schema", "Can't locate revision", "migration in unexpected state"),
    ),
    "cannot be used ({detail}); repair it, or name another": (
        *("unable to open database", "is not a database", "malformed", "unsupported file format", "readonly database"),
    ),
    "cannot be used ({detail}); give a URI of SQLAlchemy": ("Can't load plugin", "Could not parse"),
}
MISSING = {
    "did not answer within tracking.timeout_s={limit:g}; find out what keeps it busy, or raise tracking.timeout_s": (
        *("timed out", "timeout exception", "database is locked"),
    ),
    "answers with an error (429 or 5xx); look at its log": ("error responses",),
    "does not answer by TLS; give http:// if it has none, or name its certificate in REQUESTS_CA_BUNDLE": ("SSLError",),
    "is not there: start the server, or name another": ("API request to http", "Connection refused"),
}
"""BAD_INPUT and MISSING: message about the store -> substrings of an error's text. The first match in this order counts."""


@contextmanager
def store_errors(location: Location) -> Iterator[None]:
    """Turn errors of the store into one line, and announce a wait longer than QUIET_S.

    Raises UserError if the store refuses the credentials, or is of another kind or release; MissingRequirement if it does not
    answer, is locked, lacks its driver, or fails.
    """
    try:
        with announced(f"waiting for {location}; a request may take {location.timeout_s:g} s (tracking.timeout_s)", QUIET_S):
            yield
    except Exception as error:
        # The check of the module excludes the exceptions of requests, which derive from OSError.
        of_machine = isinstance(error, MACHINE_ERRORS) and type(error).__module__ == "builtins"
        if of_machine or isinstance(error, Refusal) or getattr(error, "error_code", None) in HANDLED:
            raise
        raise _problem(location, error) from error


def _problem(location: Location, error: Exception) -> Exception:
    if isinstance(error, ModuleNotFoundError):
        driver = DRIVERS.get(str(error.name), error.name)
        return MissingRequirement(f"{location} takes a driver that is not installed: {error.name}; pip install {driver}")
    text = f"{getattr(error, 'error_code', '')}: {error}"
    for kind, answers in ((UserError, BAD_INPUT), (MissingRequirement, MISSING)):
        for words, signs in answers.items():
            if any(sign in text for sign in signs):
                return kind(f"{location} {words.format(limit=location.timeout_s, detail=_driver_line(error))}")
    return MissingRequirement(f"{location} failed ({short(_driver_line(error), 200)}); look at its log, or name another")


def _driver_line(error: Exception) -> str:
    """Return the most useful line of an error's text: for SQLAlchemy, the line with the driver's error; else the first."""
    lines = redact_text(str(error)).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if line.startswith("(") and "Error) " in line), lines[0]).strip()


def check_reachable(location: Location) -> None:
    """Refuse a database that cannot be opened, or is another program's. Raises as `store_errors`."""
    if location.served:  # MLflow's client fails fast
        return
    with store_errors(location):
        from sqlalchemy import create_engine

        kind = location.uri.partition(":")[0]
        key = "timeout" if kind.startswith(("sqlite", "mssql")) else "connect_timeout"
        engine = create_engine(location.uri, connect_args={key: max(1, round(location.timeout_s))})
        try:
            with engine.connect() as connection:
                if kind == "sqlite":  # SQLite opens its file at the first statement
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                    tables = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars().all()
                    if tables and set(tables).isdisjoint(MLFLOWS):
                        raise UserError(f"{location} is a database of another program; name another file")
        finally:
            engine.dispose()


ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Tables and columns of MLflow's database with the absolute address of a file or folder."""


def path_of(address: str) -> Path:
    return Path(unquote(urlsplit(address).path))


def follow_move(location: Location) -> None:
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


def check_files(location: Location, address: str) -> None:
    """Refuse a store whose files were moved without it, and a copy of a SQLite store."""
    if location.artifact_root is None or address == location.artifact_root or not address.startswith("file:"):
        return
    old, new = path_of(address), path_of(location.artifact_root)
    if new.is_dir() and not old.exists():
        raise UserError(
            f"{location} has its files in {old}, which was moved to {new}: move it back, or let the old path lead to "
            f"the new one: mkdir -p {old.parent} && ln -s {new} {old}"
        )
    if location.file is not None and location.file.parent == new.parent and old.resolve() != new.resolve():
        raise UserError(
            f"{location} is a copy, which would write into the original's files in {old}: give the original's workdir, "
            f"or begin a store here: rm -r {location.file} {new}"
        )
