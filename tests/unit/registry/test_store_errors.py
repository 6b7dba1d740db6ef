"""Unusable tracking stores give one line, quickly, without a password and without MLflow's traceback.

Also the location of the store, and its name in addresses and commands.
"""

import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
from helpers.refusals import refused

from pipeline.config.config import ENVIRONMENT, Tracking
from pipeline.registry import store_errors
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.store_errors import check_reachable
from pipeline.registry.tracking import Location, compare_url, locate, server_command
from stages.core.errors import MissingRequirement, UserError

SECRET = "hunter2/hunter2"
ANY = ("127.0.0.1", 0)
"""Any free port."""


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """Serve one answer to every request until the block ends; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", "/login")
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(ANY, Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # connections may break
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refusal(uri: str, folder: Path, kind: type[Exception]) -> str:
    location = locate(Tracking(timeout_s=1), folder / "work", "tiny", {ENVIRONMENT: uri})
    with refused(kind, "MLflow's store ", "(tracking.uri or MLFLOW_TRACKING_URI)") as caught:
        MlflowStore(location)
    assert "hunter2" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"SQLite format 3\0" + b"\xff" * 4096, "; repair it, or name another"),
        (b"precious notes, which are longer than a header", "; repair it, or name another"),
        (None, "is a database of another program; name another file"),
    ],
    ids=["damaged", "text", "another program"],
)
def test_a_file_that_is_no_store_is_refused_and_stays_unchanged(
    content: bytes | None, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mlflow.db"
    if content is None:
        with sqlite3.connect(path) as other:
            other.execute("create table moz_places (url)")
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    assert refusal(f"sqlite:///{path}", tmp_path, UserError).endswith(problem)
    assert path.read_bytes() == before
    assert caplog.text == ""


@pytest.mark.parametrize("served", [False, True])
def test_a_silent_store_is_awaited_for_the_configured_time(
    served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_errors, "QUIET_S", 0.2)
    with closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as other, socket.create_server(ANY) as silent:
        other.execute("create table t (a)")
        other.execute("begin exclusive")
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}" if served else f"sqlite:///{tmp_path}/mlflow.db"
        text = refusal(uri, tmp_path, MissingRequirement)
    assert text.endswith("did not answer within tracking.timeout_s=1; find out what keeps it busy, or raise tracking.timeout_s")
    assert caplog.messages[0].startswith(f"waiting for MLflow's store {uri} ")
    assert "a request may take 1 s" in caplog.text


def test_a_store_is_completed_after_an_interrupted_start(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "mlflow.db") as half:
        half.execute("create table experiments (experiment_id integer primary key)")
    check_reachable(locate(Tracking(), tmp_path, "tiny", {ENVIRONMENT: f"sqlite:///{tmp_path}/mlflow.db"}))


with socket.create_server(ANY) as _free:
    NOBODY = f"127.0.0.1:{_free.getsockname()[1]}"
    """An address at which nothing listens."""


@pytest.mark.parametrize(
    ("uri", "kind", "expected"),
    [
        (f"postgresql+x://u:{SECRET}@h/db", UserError, "sqlalchemy.dialects:postgresql.x); give a URI of SQLAlchemy"),
        (f"mysql://u:{SECRET}@h/db", MissingRequirement, "not installed: MySQLdb; pip install mysqlclient"),
        (f"mssql+pymssql://u:{SECRET}@h/db", MissingRequirement, "not installed: pymssql; pip install pymssql"),
        (f"http://me:hunter2@{NOBODY}", MissingRequirement, "is not there: start the server"),
        (f"http://me:{SECRET}@127.0.0.1:5000", UserError, "(/ is %2F)"),
    ],
    ids=["unknown driver", "missing driver", "missing driver of that name", "no server", "password in the address"],
)
def test_an_address_without_a_store_is_named(uri: str, kind: type[Exception], expected: str, tmp_path: Path) -> None:
    assert expected in refusal(uri, tmp_path, kind)


@pytest.mark.parametrize(
    ("status", "body", "kind", "expected"),
    [
        (401, b"who are you?", UserError, "refuses these credentials (401); set MLFLOW_TRACKING_USERNAME and"),
        (403, b"no", UserError, "does not permit this (403)"),
        (403, b"Invalid Host header - possible DNS rebinding attack detected", UserError, "start it with --allowed-hosts"),
        (200, b"<html>", UserError, "is not an MLflow server"),
        (200, b"{}", UserError, "is not an MLflow server"),
        (200, b'{"experiment": 7}', MissingRequirement, "); look at its log, or name another"),
        (302, b"", UserError, "is not an MLflow server"),
        (304, b"", UserError, "is not an MLflow server"),
        (500, b'{"error_code": "INTERNAL_ERROR", "message": "hunter2"}', MissingRequirement, "with an error (429 or 5xx)"),
    ],
)
def test_each_error_of_a_server_has_its_own_message(
    status: int, body: bytes, kind: type[Exception], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_PASSWORD", "hunter2")
    with answering(status, body) as url:
        assert expected in refusal(url.replace("//", f"//me:{SECRET.replace('/', '%2F')}@"), tmp_path, kind)


def located(work: Path, uri: str | None = None, model: str = "tiny") -> Location:
    return locate(Tracking(), work, model, {} if uri is None else {ENVIRONMENT: uri})


def test_the_default_store_is_absolute_in_the_work_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = located(Path("work"), model="my model:v1/x")
    assert location.uri == f"sqlite:///{tmp_path}/work/mlflow.db"
    assert location.artifact_root == f"file://{tmp_path}/work/mlartifacts"
    assert (location.model_name, location.log_bundle) == ("kvgate-my_model_v1_x", True)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")  # another check refuses it, in a dry run after this one
    assert located(tmp_path / "loop").file == tmp_path / "loop" / "mlflow.db"


def test_an_empty_file_or_a_directory_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    for name, exists in (("empty.db", False), ("missing.db", False), ("", True)):
        location = located(tmp_path / "work", f"sqlite:///{tmp_path}/{name}")
        assert location.exists == exists
        assert location.lock == located(tmp_path / "other", location.uri).lock, "work directories may share a database"


def test_a_server_keeps_its_artifacts_and_gets_no_bundles(tmp_path: Path) -> None:
    environ = {ENVIRONMENT: "http://server:5000"}
    assert locate(Tracking(uri="https://other"), tmp_path, "tiny", environ).uri == "https://other"
    location = locate(Tracking(), tmp_path, "tiny", environ)
    assert (location.uri, location.artifact_root, location.log_bundle) == ("http://server:5000", None, False)
    assert server_command(location) is None


@pytest.mark.parametrize(
    ("uri", "folder", "message"),
    [
        (None, "a%20b", "MLflow keeps no store in a path with"),
        ("", "a%20b", "MLflow keeps no store in a path with"),
        ("ftp://me:hunter2@host", "work", r"MLFLOW_TRACKING_URI=ftp://\*\*\*@host"),
        ("mlruns", "work", "MLFLOW_TRACKING_URI=mlruns"),
    ],
)
def test_an_unusable_place_is_refused_without_showing_its_password(
    uri: str | None, folder: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        located(tmp_path / folder, uri)
    assert "hunter2" not in str(caught.value)


def test_the_shown_address_has_no_password_and_opens_the_sweep(tmp_path: Path) -> None:
    command = str(server_command(located(tmp_path, "postgresql://me:hunter2@db/mlflow")))
    assert "hunter2" not in command
    assert '--backend-store-uri "$MLFLOW_TRACKING_URI"' in command
    url = compare_url(located(tmp_path), "7", "20260101-a b")
    assert url.startswith("http://127.0.0.1:5000/#/experiments/7/runs?")
    query = parse_qs(urlparse(urlparse(url).fragment).query)
    expected = {"searchFilter": ["tags.sweep = '20260101-a b'"], "compareRunsMode": ["CHART"]}
    assert expected.items() <= query.items()
