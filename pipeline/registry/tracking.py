"""Where runs are tracked: the typed configuration, and what it means on this machine. MLflow itself is not imported here."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self
from urllib.parse import quote, urlencode

from pydantic import Field, model_validator

from pipeline.core.errors import UserError
from pipeline.core.redaction import redact_text
from pipeline.core.strict import StrictModel
from pipeline.registry.summary import Candidate

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore

SCHEMES = ("sqlite:///", "postgresql", "mysql", "mssql", "http://", "https://")
ENVIRONMENT = "MLFLOW_TRACKING_URI"


class Tracking(StrictModel):
    """MLflow tracking and registry."""

    enabled: bool = True
    uri: str | None = None
    """A database URI or a server's address; null means MLFLOW_TRACKING_URI, else SQLite in the work directory."""
    experiment: Annotated[str, Field(min_length=1, max_length=200)] = "kvgate"
    model_name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^/:]+$")] | None = None
    """Registered model; null means `kvgate-<model>`."""
    log_bundle: bool | None = None
    """Whether the registry gets a copy of the whole bundle; null means only where the store is on this machine."""

    @model_validator(mode="after")
    def _keeps_secrets_out(self) -> Self:
        # configurations are shown, stored beside sweeps and logged
        if self.uri is not None and redact_text(self.uri) != self.uri:
            raise ValueError(f"uri must not hold a password: set {ENVIRONMENT} in the environment instead")
        return self


@dataclass(frozen=True)
class Location:
    """A tracking store, resolved: absolute, and with the lock that serialises this host's changes to it."""

    uri: str
    artifact_root: str | None
    """Where a new experiment keeps its artifacts; None leaves it to the server."""
    lock: Path
    experiment: str
    model_name: str
    log_bundle: bool

    @property
    def served(self) -> bool:
        """Whether a tracking server already answers at `uri`."""
        return self.uri.startswith(("http://", "https://"))


def locate(tracking: Tracking, workdir: Path, model: str, environ: Mapping[str, str] = os.environ) -> Location:
    """Resolve `tracking` for the work directory and the model's label. Raises UserError for a URI that cannot be used."""
    workdir = workdir.resolve()
    uri = tracking.uri or environ.get(ENVIRONMENT) or f"sqlite:///{workdir / 'mlflow.db'}"
    if not uri.startswith(SCHEMES):
        key = "tracking.uri" if tracking.uri else ENVIRONMENT
        raise UserError(f"{key}={redact_text(uri)}: give sqlite:///FILE, a database URI or http(s)://HOST of MLflow")
    lock = workdir / "mlflow.lock"
    if uri.startswith("sqlite:///"):
        # A relative file would be another store in every working directory; work directories that share a file share its lock.
        database = Path(uri.removeprefix("sqlite:///")).expanduser().resolve()
        uri, lock = f"sqlite:///{database}", database.with_name(f"{database.name}.lock")
    served = uri.startswith("http")
    return Location(
        uri=uri,
        artifact_root=None if served else (workdir / "mlartifacts").as_uri(),
        lock=lock,
        experiment=tracking.experiment,
        model_name=tracking.model_name or "kvgate-" + re.sub(r"[^\w.-]", "_", model),
        log_bundle=uri.startswith("sqlite:///") if tracking.log_bundle is None else tracking.log_bundle,
    )


class Run(Protocol):
    """A candidate's run while it is open; methods are described in `pipeline.registry.mlflow_store`."""

    def stage(self, name: str, params: Mapping[str, object], *, digest: str, seconds: float, reused: bool) -> None: ...

    def conclude(
        self, candidate: Candidate, rows: Sequence[Mapping[str, Any]] = (), files: Sequence[Path] = ()
    ) -> Candidate: ...


class Untracked:
    """The run of `tracking.enabled=false`: nothing is logged, nothing registered."""

    def stage(self, name: str, params: Mapping[str, object], *, digest: str, seconds: float, reused: bool) -> None:
        """Not logged."""

    def conclude(
        self,
        candidate: Candidate,
        rows: Sequence[Mapping[str, Any]] = (),  # noqa: ARG002
        files: Sequence[Path] = (),  # noqa: ARG002
    ) -> Candidate:
        return candidate


@contextmanager
def track(store: "MlflowStore | None", sweep: str, kv: str, backend: str, config: Mapping[str, object]) -> Iterator[Run]:
    """A candidate's run in `store`, or one that logs nothing when tracking is off."""
    if store is None:
        yield Untracked()
        return
    with store.candidate(sweep, kv, backend, config) as run:
        yield run


def open_store(tracking: Tracking, workdir: Path, model: str) -> "MlflowStore | None":
    """The tracking store; None when tracking is off. Imports MLflow (2 s). Raises UserError when it cannot be opened."""
    if not tracking.enabled:
        return None
    location = locate(tracking, workdir, model)
    from pipeline.registry.mlflow_store import MlflowStore

    return MlflowStore(location)


def server_command(location: Location, port: int = 5000) -> str | None:
    """The shell command that opens MLflow on this store; None when a server already does. Never prints a password."""
    if location.served:
        return None
    script = Path(sys.executable).with_name("mlflow")
    program = shlex.quote(str(script)) if script.exists() else "mlflow"
    uri = shlex.quote(location.uri) if redact_text(location.uri) == location.uri else f'"${ENVIRONMENT}"'
    # Without its job runners, which only language-model judges use, the server takes 0.5 GB instead of 2.5.
    switches = "MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false"
    return f"{switches} {program} server --backend-store-uri {uri} --workers 1 --port {port}"


def compare_url(location: Location, experiment_id: str, run_ids: Sequence[str], port: int = 5000) -> str:
    """Address of MLflow's comparison of these runs; without workflowType MLflow 3 opens its pages for traces."""
    base = redact_text(location.uri).rstrip("/") if location.served else f"http://127.0.0.1:{port}"
    query = {
        "runs": json.dumps(list(run_ids), separators=(",", ":")),
        "experiments": json.dumps([experiment_id], separators=(",", ":")),
        "workflowType": "machine_learning",
    }
    return f"{base}/#/compare-runs?{urlencode(query, quote_via=quote)}"
