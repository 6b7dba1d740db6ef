"""Crowds of processes on one store, and runs with a fault at every eightieth operation.

The crowd has ten processes: six in different stages, and four that move aliases. The store is SQLite, or MLflow's server on
PostgreSQL. Only child processes open the store, as real commands do, because MLflow keeps a database open.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.commands.interruptions import FAULTS, FORK, Attempt, Fault, attempt
from helpers.registry.candidates import engines_of
from helpers.registry.judged_engine import SAMPLES, judged_engine
from helpers.registry.judged_work import JudgedWork

from pipeline.registry import summary
from pipeline.registry.promotion import Engines
from pipeline.store.store import Store, read_manifest
from stages.core.artifact import Recipe
from stages.core.digest import tree_files
from stages.core.errors import GateRefusal, UserError
from stages.core.files import write_atomically

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore

HINT = "needs PostgreSQL's server (Debian: apt-get install postgresql) and psycopg2; REQUIRE_POSTGRES=1 makes this a failure"


def require_postgres() -> Path:
    """Return the folder of PostgreSQL's programs, which Debian does not put on PATH. Skips the test without PostgreSQL."""
    initdb = shutil.which("initdb")
    folders = [Path(initdb).resolve().parent] if initdb else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    folder = next((folder for folder in folders if (folder / "pg_ctl").exists()), None)
    if folder is None or find_spec("psycopg2") is None:
        if os.environ.get("REQUIRE_POSTGRES") == "1":
            pytest.fail(HINT)
        pytest.skip(HINT)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@contextmanager
def postgres() -> Iterator[str]:
    """Start a fresh database and yield its URI. PostgreSQL refuses to run as root, so root runs it as the user `nobody`."""
    folder, port = require_postgres(), free_port()
    user = "nobody" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="kvgate-postgres-", dir="/tmp", ignore_cleanup_errors=True) as home:
        if user is not None:
            shutil.chown(home, user)

        def call(program: str, *arguments: str) -> None:
            subprocess.run([str(folder / program), "-D", "data", *arguments], check=True, user=user, cwd=home, timeout=120)

        call("initdb", "-U", "kvgate", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k {home} -F"
        call("pg_ctl", "-w", "-l", "log", "-o", options, "start")
        try:
            yield f"postgresql+psycopg2://kvgate@127.0.0.1:{port}/postgres"
        finally:
            call("pg_ctl", "-m", "immediate", "stop")


@contextmanager
def mlflow_server(database: str, artifacts: Path) -> Iterator[str]:
    """Start MLflow's server on a database and yield its address."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database, "--workers", "2"]
    command += ["--artifacts-destination", str(artifacts), "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
        while not _is_healthy(address):
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait(30)


def _is_healthy(address: str) -> bool:
    with suppress(OSError):
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
        return True
    return False


ROUNDS = 2


def engines_in(work: Path, store: "MlflowStore") -> Engines:
    sweeps = [path.stem for path in (work / summary.FOLDER).glob("[!.]*.json")]
    candidates = [candidate for sweep in sweeps for candidate in summary.load(work, sweep).candidates]
    return engines_of(store, [candidate for candidate in candidates if candidate.version])


SHARED = ("int8", "fp8", "int8_tensor")
"""Policies that several processes build and judge."""


def run_part(number: int, work: Path, kind: str, uri: str | None) -> list[str]:
    """Run the part of one process in a round; return the versions that it registered."""
    judged, sweep = JudgedWork(work, uri, log_bundle=True), f"sweep-{os.getpid()}"
    if kind == "build":
        judged_engine(judged.artifacts, kv=SHARED[number])
    elif kind == "evaluate":
        return [judged.judge("int8", *SAMPLES, f"seed={os.getpid()}", sweep=sweep).version]
    elif kind == "sweep":
        return [judged.judge(kv, sweep=sweep).version for kv in (SHARED[number], SHARED[0])]
    elif kind == "verify":
        for path in (work / "artifacts").glob("[!.]*/[!.]*"):
            manifest = read_manifest(path)
            assert manifest is not None, f"{path} is visible but not finished"
            assert tree_files(path) == manifest["files"], path
    elif kind == "promote":
        last = summary.load(work)
        try:
            engines_in(work, judged.store).promote(last.candidates, "some-llm")
        except GateRefusal as error:
            if not any(reason in str(error) for reason in ("rolled back", "no candidate", "another command moved it")):
                raise
    elif kind == "rollback":
        with suppress(UserError, GateRefusal):  # there may be no previous champion, or another command moves it
            engines_in(work, judged.store).rollback()
    return []


KINDS = ("build", "evaluate", "sweep", "sweep", "evaluate", "verify", "promote", "rollback", "promote", "rollback")


def _part(number: int, work: Path, uri: str | None, results: Any) -> None:
    try:
        results.put((number, run_part(number % 3, work, KINDS[number], uri), ""))
    except BaseException:
        results.put((number, [], traceback.format_exc()))


def check_nothing_is_lost(work: Path, uri: str | None, versions: list[str], serves: bool) -> None:
    """Assert that no version or evidence is lost and every run has ended. `serves`: whether there must be a champion."""
    store = JudgedWork(work, uri).store
    registered = store.read()
    known = registered.versions
    assert set(versions) <= known.keys()
    assert all(version.tags["verdict"] == "PASS" and len(version.tags) <= 6 for version in known.values())
    runs = store.client.search_runs([store.experiment_id], max_results=1000)
    open_runs = [(run.info.run_name, run.info.status, run.data.tags) for run in runs if run.info.status != "FINISHED"]
    assert open_runs == [], open_runs
    for version in known.values():
        model = store.client.get_logged_model(version.model_id)
        assert str(model.status) == "READY"
        assert "report.json" in {file.path for file in store.client.list_logged_model_artifacts(model.model_id)}
    assert registered.aliases.get("champion") in known or not serves
    assert list((work / "artifacts" / ".partial").glob("*/*")) == []
    run_part(0, work, "verify", uri)


def run_in_child(work: Path, job: Callable[[], object]) -> None:
    ended = attempt(job, work)
    assert ended.code == 0, ended.traceback


def run_rounds(work: Path, uri: str | None = None) -> None:
    """Run all processes at once, ROUNDS times. In the first round the store does not exist yet."""
    versions: list[str] = []
    for round_number in range(ROUNDS):
        results: Any = FORK.Queue()
        parts = [FORK.Process(target=_part, args=(number, work, uri, results)) for number in range(len(KINDS))]
        for part in parts:
            part.start()
        ended = [results.get(timeout=300) for _ in parts]
        for part in parts:
            part.join(60)
        failed = [(KINDS[number], error) for number, _, error in ended if error]
        assert failed == [], "\n".join(error for _, error in failed)
        versions += [version for _, registered, _ in ended for version in registered]
        run_in_child(work, partial(check_nothing_is_lost, work, uri, versions, serves=round_number > 0))


def test_nothing_is_lost_on_sqlite(tmp_path: Path) -> None:
    run_rounds(tmp_path / "work")


def test_nothing_is_lost_on_a_server_with_postgresql(tmp_path: Path) -> None:
    with postgres() as database, mlflow_server(database, tmp_path / "artifacts") as address:
        run_rounds(tmp_path / "work", address)


EXIT_CODES: dict[Fault, set[int]] = {"SIGKILL": {-9}, "SIGTERM": {130}, "ENOSPC": {0, 1}, "EIO": {0, 1}}
"""Allowed exit codes of a process with this fault; 0 if only a clean-up failed."""
EVERY = int(os.environ.get("KVGATE_EVERY", "80"))
"""Distance between operations with a fault. KVGATE_EVERY=1 tests every operation, in half an hour."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a template of the work directory: an empty store, whose tables take seconds to create."""
    folder = tmp_path_factory.mktemp("faults")
    created = attempt(lambda: JudgedWork(folder / "work").store.location.exists, folder)
    assert created.code == 0, created.traceback
    (folder / "work").rename(folder / "template")
    return folder


def measure(out: Path) -> None:
    """Save three samples, each as it finishes."""
    for part in (out / f"part{number}" for number in range(3)):
        if not part.exists():
            write_atomically(part, "measured")


def judge(folder: Path) -> tuple[str, ...]:
    """Judge one engine; return what must be equal in every run of the same work."""
    judged = JudgedWork(folder / "work", log_bundle=True)
    Store(judged.artifacts).make(Recipe("measured", {}, {}), measure, resumable=True)
    candidate = judged.judge("fp8", sweep="sweep")
    cited = (candidate.engine, candidate.baseline, candidate.report, candidate.identity)
    return (candidate.verdict, candidate.version, *(each.digest for each in cited))


def judge_and_check(folder: Path) -> tuple[str, ...]:
    """Judge one engine; assert that the failed attempt left no files and that the new results are complete."""
    ended, work = judge(folder), folder / "work"
    hidden = [path for path in (work / "artifacts").rglob(".*") if path.is_dir() and path.name not in (".partial", ".files")]
    assert hidden == []
    assert list((work / "artifacts" / ".partial").glob("*/*")) == []
    store = JudgedWork(work).store
    assert "FINISHED" in {run.info.status for run in store.client.search_runs([store.experiment_id])}
    assert len(store.read().versions) == 1
    last = summary.load(work)
    assert ([candidate.name for candidate in last.candidates], last.exit_codes) == (["fp8"], {1: 0})
    return ended


def attempt_anew(folder: Path, at: int | None = None, fault: Fault = "SIGKILL") -> Attempt:
    """Judge one engine in a new work directory."""
    shutil.rmtree(folder / "work", ignore_errors=True)
    shutil.copytree(folder / "template", folder / "work")
    return attempt(partial(judge, folder), folder / "work", at, fault)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Attempt:
    """A run without a fault."""
    run = attempt_anew(folder)
    assert run.code == 0, run.traceback
    return run


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_recovers_from_a_fault_at_any_operation(fault: Fault, folder: Path, undisturbed: Attempt) -> None:
    for at in range(1 + FAULTS.index(fault) % EVERY, undisturbed.operations + 1, EVERY):
        failed = attempt_anew(folder, at, fault)
        assert failed.code in EXIT_CODES[fault], (at, failed.traceback)
        recovered = attempt(partial(judge_and_check, folder), folder)
        assert recovered.code == 0, (at, recovered.traceback)
        assert recovered.returned == undisturbed.returned, at
