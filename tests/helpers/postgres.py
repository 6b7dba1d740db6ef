"""A temporary PostgreSQL database for tests, and an MLflow server that uses it."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import await_up, free_port

HINT = "needs PostgreSQL's server (Debian: apt-get install postgresql) and psycopg2; REQUIRE_POSTGRES=1 makes this a failure"


def programs() -> Path | None:
    """Return the folder with initdb and pg_ctl, which Debian does not put on PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "pg_ctl").exists()), None)


def require_postgres() -> Path:
    """Return the folder of PostgreSQL's programs. Skips the test if PostgreSQL or psycopg2 is missing."""
    folder = programs()
    if folder is None or find_spec("psycopg2") is None:
        if os.environ.get("REQUIRE_POSTGRES") == "1":
            pytest.fail(HINT)
        pytest.skip(HINT)
    return folder


@contextmanager
def postgres() -> Iterator[str]:
    """Start a fresh database and yield its URI. PostgreSQL refuses to run as root, so root runs it as the user `nobody`."""
    folder, port = require_postgres(), free_port()
    home = Path(tempfile.mkdtemp(prefix="kvgate-postgres-", dir="/tmp"))
    user = "nobody" if os.geteuid() == 0 else None
    if user is not None:
        shutil.chown(home, user)

    def call(program: str, *arguments: str) -> None:
        command = [str(folder / program), *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, user=user, cwd=home, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        call("initdb", "-D", "data", "-U", "kvgate", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k {home} -F"
        call("pg_ctl", "-D", "data", "-w", "-l", "log", "-o", options, "start")
        try:
            yield f"postgresql+psycopg2://kvgate@127.0.0.1:{port}/postgres"
        finally:
            call("pg_ctl", "-D", "data", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def mlflow_server(database: str, artifacts: Path) -> Iterator[str]:
    """Start MLflow's server on a database and yield its address."""
    port, log = free_port(), artifacts.with_name("server.log")
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database, "--workers", "2"]
    command += ["--artifacts-destination", str(artifacts), "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as stream:
        server = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        await_up(address, server, log)
        yield address
    finally:
        server.terminate()
        server.wait(30)
