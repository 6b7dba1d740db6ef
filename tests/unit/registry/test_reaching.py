"""Unusable tracking stores give one line, quickly, without a password and without MLflow's traceback."""

import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import refused

from pipeline.registry import reaching
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.reaching import check_reachable
from pipeline.registry.tracking import ENVIRONMENT, Location, Tracking, locate
from stages.core.errors import MissingRequirement, UserError


class Silent(BaseHTTPRequestHandler):
    """A request handler that does not log."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def served(handler: type[Silent]) -> Iterator[str]:
    """Serve until the block ends; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # connections may break
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def answering(*answers: tuple[int, bytes] | Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[Any]]]:
    """Serve the given answers in order and repeat the last answer; yield the URL and the list of received headers."""
    left, seen = list(answers), list[Any]()

    class Handler(Silent):
        def do_GET(self) -> None:
            seen.append(dict(self.headers))
            answer = left.pop(0) if len(left) > 1 else left[0]
            if callable(answer):
                answer(self)
                return
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(answer[1])))
            self.send_header("Location", "/login")
            self.end_headers()
            self.wfile.write(answer[1])

        do_POST = do_GET

    with served(Handler) as url:
        yield url, seen


SECRET = "hunter2/hunter2"


def refusal(uri: str, folder: Path, kind: type[Exception]) -> str:
    location = locate(Tracking(timeout_s=1), folder / "work", "tiny", {ENVIRONMENT: uri})
    with refused(kind, "MLflow's store ", "(tracking.uri or MLFLOW_TRACKING_URI)") as caught:
        MlflowStore(location)
    assert "hunter2" not in str(caught.value)
    return str(caught.value)


def signed_in(url: str) -> str:
    return url.replace("//", f"//me:{SECRET.replace('/', '%2F')}@")


@pytest.mark.parametrize("kind", ["directory", "text", "damaged"])
def test_a_file_that_is_no_database_is_refused_and_stays_unchanged(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mlflow.db"
    content = {"text": b"precious notes, which are longer than a header", "damaged": b"SQLite format 3\0" + b"\xff" * 4096}
    if kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(content[kind])
    assert refusal(f"sqlite:///{path}", tmp_path, UserError).endswith("; repair it, or name another")
    assert path.is_dir() or path.read_bytes() == content[kind]
    assert caplog.text == ""


def test_a_locked_database_is_waited_for_as_long_as_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reaching, "QUIET_S", 0.2)
    other = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)
    other.execute("create table t (a)")
    other.execute("begin exclusive")
    try:
        text = refusal(f"sqlite:///{tmp_path}/mlflow.db", tmp_path, MissingRequirement)
    finally:
        other.close()
    assert text.endswith("did not answer within tracking.timeout_s=1; look at who keeps it busy, or give it longer")
    assert "a request may take until" in caplog.text


def test_the_database_of_another_program_is_refused_and_stays_unchanged(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "places.sqlite") as other:
        other.execute("create table moz_places (url)")
    before = (tmp_path / "places.sqlite").read_bytes()
    text = refusal(f"sqlite:///{tmp_path}/places.sqlite", tmp_path, UserError)
    assert text.endswith("is a database of another program; name another file")
    assert (tmp_path / "places.sqlite").read_bytes() == before


def test_a_store_whose_first_command_was_interrupted_is_completed(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "mlflow.db") as half:
        half.execute("create table experiments (experiment_id integer primary key)")
    check_reachable(locate(Tracking(), tmp_path, "tiny", {ENVIRONMENT: f"sqlite:///{tmp_path}/mlflow.db"}))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be made (" in refusal(f"sqlite:///{tmp_path}/file/below/mlflow.db", tmp_path, UserError)


@pytest.mark.parametrize(
    ("uri", "kind", "expected"),
    [
        (f"postgresql+x://u:{SECRET}@h/db", UserError, "sqlalchemy.dialects:postgresql.x); give a URI of SQLAlchemy"),
        (f"mysql://u:{SECRET}@h/db", MissingRequirement, "not installed: MySQLdb; pip install mysqlclient"),
        (
            f"mssql+pymssql://u:{SECRET}@h/db",
            MissingRequirement,
            "takes a driver that is not installed: pymssql; pip install pymssql",
        ),
    ],
)
def test_a_driver_that_is_missing_or_unknown_is_named(uri: str, kind: type[Exception], expected: str, tmp_path: Path) -> None:
    assert expected in refusal(uri, tmp_path, kind)


@pytest.mark.parametrize(
    ("status", "body", "kind", "expected"),
    [
        (401, b"who are you?", UserError, "refuses these credentials (401); set MLFLOW_TRACKING_USERNAME and"),
        (403, b"no", UserError, "does not permit this (403)"),
        (403, b"Invalid Host header - possible DNS rebinding attack detected", UserError, "start it with --allowed-hosts"),
        (404, b"<html>", UserError, "is no server of MLflow"),
        (200, b"<html>", UserError, "is no server of MLflow"),
        (302, b"", UserError, "is no server of MLflow"),
        (500, b'{"error_code": "INTERNAL_ERROR", "message": "hunter2"}', MissingRequirement, "an error of its own (5xx)"),
    ],
)
def test_each_error_of_a_server_has_its_own_message(
    status: int, body: bytes, kind: type[Exception], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_PASSWORD", "hunter2")
    with answering((status, body)) as (url, _):
        assert expected in refusal(signed_in(url), tmp_path, kind)


def test_an_unreachable_server_is_reported_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "is not there: start the server" in refusal(f"http://me:hunter2@127.0.0.1:{port}", tmp_path, MissingRequirement)


def test_a_password_that_changes_the_address_must_be_encoded(tmp_path: Path) -> None:
    assert "(/ is %2F)" in refusal(f"http://me:{SECRET}@127.0.0.1:5000", tmp_path, UserError)


def test_a_silent_server_is_waited_for_as_long_as_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reaching, "QUIET_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        text = refusal(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, MissingRequirement)
    assert "did not answer within tracking.timeout_s=1; " in text
    said = caplog.messages[0]
    assert said.startswith("waiting for MLflow's store http://127.0.0.1:")
    assert "(tracking.timeout_s=1)" in said


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Location, sqlite3.Connection]]:
    """A store with a version, and a copy of its database."""
    work = tmp_path_factory.mktemp("sound")
    location = locate(Tracking(), work, "tiny", {})
    store = MlflowStore(location)
    store.client.create_model_version("kvgate-tiny", "source", run_id="a", tags={"kv": "fp8"})
    assert [version.tags for version in store.read().versions.values()] == [{"kv": "fp8"}]
    copy = sqlite3.connect(":memory:")
    with sqlite3.connect(work / "mlflow.db") as database:
        database.backup(copy)
    yield location, copy
    copy.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE model_versions SET creation_time = 400000000000000000",
        "UPDATE model_versions SET creation_time = 'soon'",
        "UPDATE model_versions SET creation_time = -5",
        "UPDATE model_versions SET run_id = 5",
        "UPDATE model_version_tags SET value = 5",
        "UPDATE experiments SET artifact_location = 5",
        "UPDATE experiments SET artifact_location = NULL",
        "UPDATE experiments SET lifecycle_stage = 5",
    ],
)
def test_odd_values_of_a_store_are_a_line_or_harmless(statement: str, sound: tuple[Location, sqlite3.Connection]) -> None:
    location, copy = sound
    assert location.file is not None
    with sqlite3.connect(location.file) as database:
        copy.backup(database)  # creating its tables takes a second
        database.execute("PRAGMA ignore_check_constraints = ON")
        database.execute(statement)
    try:
        assert list(MlflowStore(location).read().versions) == ["1"]
    except (UserError, MissingRequirement) as error:
        assert "MLflow" in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
