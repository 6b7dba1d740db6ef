"""The store that the configuration of tracking resolves to on this machine. Does not import MLflow."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from pipeline.config.config import ENVIRONMENT, Tracking
from stages.core.errors import GateRefusal, MissingRequirement, UserError, short
from stages.core.redaction import holds_secret, redact_text
from stages.core.strict import absolute_path

SQLITE = "sqlite:///"
SCHEMES = (SQLITE, "postgresql", "mysql", "mssql", "http://", "https://")
CHAMPION = "champion"
"""Alias of the version that serves."""
IDENTITY_TAG = "identity_digest"
LEFT = "left-"
"""Prefix of a registered model's tags: `left-CLASS` lists the broken versions that the route of a class moved away from."""
PORT = 5000


@dataclass(frozen=True)
class Location:
    """A resolved tracking store: absolute addresses, and the lock that serialises this host's changes to the store."""

    uri: str
    artifact_root: str | None
    """Address of a new experiment's artifacts; None: the server decides."""
    lock: Path
    experiment: str
    model_name: str
    log_bundle: bool
    timeout_s: float = 30

    def __str__(self) -> str:
        return f"MLflow's store {redact_text(self.uri)} (tracking.uri or {ENVIRONMENT})"

    @property
    def file(self) -> Path | None:
        return Path(self.uri.removeprefix(SQLITE)) if self.uri.startswith(SQLITE) else None

    @property
    def exists(self) -> bool:
        """Whether a store may exist: false if its SQLite file is missing or empty. A directory counts; opening it fails."""
        return self.file is None or self.file.is_dir() or (self.file.is_file() and self.file.stat().st_size > 0)

    @property
    def served(self) -> bool:
        return self.uri.startswith(("http://", "https://"))


class LostFiles(MissingRequirement):
    """The registry has a version, but its files are gone."""


class NoEngine(GateRefusal):
    """The registry has the evidence of a version without its engine."""


@dataclass(frozen=True)
class Version:
    """A version of a registered model: an engine with its evidence.

    It has at most six tags: `kv`, `verdict` and `identity_digest`, and the author, time and replaced version of its promotion
    or the author, time and target of its rollback. Everything else is in the evidence that `identity_digest` cites.
    """

    number: str
    tags: Mapping[str, str]
    run_id: str = ""
    made: float = 0.0
    """Seconds since 1970."""
    source: str = ""
    """Address of the files of the version's logged model."""

    @property
    def name(self) -> str:
        return self.tags.get("kv", "no name")

    @property
    def identity_digest(self) -> str:
        """sha256 of the identity.json that the version cites."""
        return self.tags.get(IDENTITY_TAG, "")

    @property
    def model_id(self) -> str:
        """Id of the logged model, taken from the address of its files, because SQL stores do not keep the id."""
        return self.source.rstrip("/").split("/")[-2] if "/" in self.source.rstrip("/") else ""

    def __str__(self) -> str:
        return f"version {self.number} ({self.name})"


@dataclass(frozen=True)
class RegisteredModel:
    """The state of a registered model when it was read."""

    name: str
    versions: Mapping[str, Version]
    aliases: Mapping[str, str]
    """Alias -> number of a version. MLflow removes a version's aliases with the version."""
    tags: Mapping[str, str] = field(default_factory=dict)
    engines: Mapping[str, str | None] = field(default_factory=dict)
    """Number of a version that an alias points at -> digest of its engine. Only `RegistryReader.registered` sets this field."""

    @property
    def pointed_at(self) -> dict[str, Version]:
        """Alias -> version, as servers read it."""
        return {alias: self.versions[number] for alias, number in self.aliases.items()}

    def left(self, workload: str) -> set[str]:
        """Return the versions from which the route of a class moved back, after a broken monitor or by routing.rollback."""
        return set(filter(None, self.tags.get(f"{LEFT}{workload}", "").split(",")))


def locate(tracking: Tracking, workdir: Path, model: str, environ: Mapping[str, str] = os.environ) -> Location:
    """Resolve the tracking configuration. `model`: the checkpoint's short name. Raises UserError for a bad URI."""
    workdir = absolute_path(str(workdir))
    uri = tracking.uri or environ.get(ENVIRONMENT) or None
    if uri is None and re.search("[?%]", str(workdir)):  # special characters of URIs
        raise UserError(f"workdir={workdir}: MLflow keeps no store in a path with ? or %; give another path")
    uri = uri or f"{SQLITE}{workdir / 'mlflow.db'}"
    if not uri.startswith(SCHEMES) or not _names_a_place(uri):
        key = "tracking.uri" if tracking.uri else ENVIRONMENT
        raise UserError(f"{key}={short(redact_text(uri))}: give sqlite:///FILE, a database URI or http(s)://HOST of MLflow")
    lock = workdir / "mlflow.lock"
    if uri.startswith(SQLITE):
        # A relative path would name another store in every current directory. Work directories that share a database file
        # also share its lock.
        database = absolute_path(uri.removeprefix(SQLITE))
        uri, lock = f"{SQLITE}{database}", database.with_name(f"{database.name}.lock")
    served = uri.startswith("http")
    return Location(
        uri=uri,
        artifact_root=None if served else (workdir / "mlartifacts").as_uri(),
        lock=lock,
        experiment=tracking.experiment,
        model_name=tracking.model_name or "kvgate-" + re.sub(r"[^\w.-]", "_", model),
        log_bundle=uri.startswith(SQLITE) if tracking.log_bundle is None else tracking.log_bundle,
        timeout_s=tracking.timeout_s,
    )


def _names_a_place(uri: str) -> bool:
    """Return whether a URI names a SQLite file, an HTTP host with a valid port, or any other database."""
    scheme, _, rest = uri.partition("://")
    if not rest or not uri.isprintable():
        return False
    if uri.startswith(SQLITE):
        return rest != "/:memory:" and os.path.normpath(rest[1:]) not in (".", "/")
    try:
        parts = urlsplit(uri)
        return not scheme.startswith("http") or (bool(parts.hostname) and parts.port != 0 and " " not in uri)
    except ValueError:  # invalid port, or a password with a slash, for which `store_errors` has a message
        return "@" in rest


def server_command(location: Location) -> str | None:
    """Return the shell command that starts MLflow on this store, without passwords; None if the store is a server."""
    if location.served:
        return None
    # Without its job runners, which only language-model judges use, the server takes 0.5 GB instead of 2.5.
    switches = "MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false"
    script = Path(sys.executable).with_name("mlflow")
    mlflow = shlex.quote(str(script)) if script.exists() else "mlflow"
    uri = shlex.quote(location.uri) if not holds_secret(location.uri) else f'"${ENVIRONMENT}"'
    return f"{switches} {mlflow} server --backend-store-uri {uri} --workers 1 --port {PORT}"


def compare_url(location: Location, experiment_id: str, sweep: str) -> str:
    """Return the address of the charts of a sweep's runs, sorted by kept probability of right answers, highest first."""
    query = {
        "searchFilter": f"tags.sweep = '{sweep}'",
        "orderByKey": "metrics.`quality/recovery`",
        "orderByAsc": "false",
        "startTime": "ALL",
        "compareRunsMode": "CHART",
        "workflowType": "machine_learning",  # without it MLflow 3 opens its pages for traces
    }
    base = redact_text(location.uri).rstrip("/") if location.served else f"http://127.0.0.1:{PORT}"
    return f"{base}/#/experiments/{experiment_id}/runs?{urlencode(query, quote_via=quote)}"
