"""Reads and writes the tracking store. Importing this module imports MLflow, which takes 2 s: import it inside functions.

A candidate is a top-level run, because nested runs collapse in MLflow's charts. The run is written after the verdict. Its name
ends with the verdict, because MLflow's list of runs shows no tags by default. Every FP16 engine of a sweep is also a run.

An engine with its evidence is a logged model and a version of the registered model. Both are looked up by the digests of the
evidence, so judging the same engine again, in any sweep, does not create a second version.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.entities import LoggedModel, LoggedModelOutput, Metric, Param, RunData, RunTag
from mlflow.exceptions import MlflowException

from pipeline.registry import run_content
from pipeline.registry.store_errors import check_files, check_reachable, follow_move, store_errors
from pipeline.registry.tracking import CHAMPION, IDENTITY_TAG, LEFT, Location, LostFiles, RegisteredModel, Version
from pipeline.store.locks import locked
from stages.core.errors import UserError
from stages.core.redaction import redact_text
from stages.verdict.candidate import Candidate
from stages.verdict.report import SampleRow

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
LOGGERS = ("alembic", "mlflow.store.db.utils", "mlflow.store.model_registry.abstract_store", "mlflow.utils.validation")
"""Loggers to silence: they log migrations, tracebacks of exceptions that are raised anyway, and texts that MLflow truncates."""
MAX_VERSIONS = 200_000
"""Maximum versions in one answer of MLflow."""


class Client:
    """MLflow's client. Every call runs within `store_errors`, which announces long waits and turns errors into one line."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._client = MlflowClient(tracking_uri=location.uri, registry_uri=location.uri)

    def __getattr__(self, name: str) -> Any:
        return store_errors(self._location)(getattr(self._client, name))


class RegistryReader:
    """Registered models and their versions. Opening a store creates its tables, and corrects the addresses of a moved store."""

    def __init__(self, location: Location) -> None:
        """Open the store. For a database, create or check its tables; for a server, send one request.

        Raises UserError if it cannot be opened; MissingRequirement if it does not answer, is locked, or lacks its driver.
        """
        check_reachable(location)
        for logger in LOGGERS:
            logging.getLogger(logger).setLevel(logging.CRITICAL)
        # MLflow reads its variable at every request, libpq at every connection.
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(1, round(location.timeout_s)))
        os.environ["PGCONNECT_TIMEOUT"] = str(max(2, round(location.timeout_s)))
        retries = os.environ[RETRIES]
        os.environ[RETRIES] = "0"  # report a missing server at once
        try:
            with store_errors(location):
                # Client forwards every method of MlflowClient, and refuses with one line if a call fails.
                self.location, self.client = location, cast(MlflowClient, Client(location))
                follow_move(location)
                if location.served:
                    self.client.search_experiments(max_results=1)
        finally:
            os.environ[RETRIES] = retries

    def model(self, name: str) -> RegisteredModel:
        """Return a registered model. Raises MlflowException if it does not exist."""
        model = self.client.get_registered_model(name)  # search_model_versions returns versions without their aliases
        entries = self.client.search_model_versions(f"name = '{name}'", max_results=MAX_VERSIONS)
        versions = {str(entry.version): version_of(entry) for entry in entries}
        aliases = {alias: str(number) for alias, number in model.aliases.items() if str(number) in versions}
        return RegisteredModel(name, versions, aliases, model.tags)

    def read(self) -> RegisteredModel:
        """Return the current state of the configured registered model. Raises UserError if it does not exist."""
        name = self.location.model_name
        try:
            return self.model(name)
        except MlflowException as error:
            raise UserError(f"{self.location} has no registered model {name}; judge one, or name another") from error

    def judged_by(self, entry: Version) -> RunData:
        """Return the tags and metrics of the run that judged a version; without any if the run is missing."""
        with suppress(MlflowException):
            if entry.run_id:  # empty if it was registered by hand; MLflow refuses an empty id
                return self.client.get_run(entry.run_id).data
        return RunData()

    def registered(self, identities: Collection[str]) -> list[RegisteredModel]:
        """Return the configured registered model, and each model with a version that cites one of `identities`."""
        known = self.client.search_model_versions(f"tags.{IDENTITY_TAG} LIKE '%'", max_results=MAX_VERSIONS)
        names = {str(entry.name) for entry in known if entry.tags[IDENTITY_TAG] in identities}
        models = []
        for name in sorted({self.location.model_name, *names}):
            with suppress(MlflowException):  # nothing was registered yet
                model = self.model(name)
                engines = {v.number: self.judged_by(v).tags.get("engine_digest") for v in model.pointed_at.values()}
                models.append(replace(model, engines=engines))
        return models

    def champion(self, names: Sequence[str]) -> Version | None:
        """Return the champion of the first registered model in `names` that has one; None if no model has one."""
        for name in names:
            with suppress(MlflowException):  # the model does not exist
                serving = self.model(name).pointed_at
                if CHAMPION in serving:
                    return serving[CHAMPION]
        return None

    def download(self, version: Version, folder: Path) -> Path:
        """Download the evidence, with the engine if the registry has a copy. Raises LostFiles if the files are gone."""
        try:
            with store_errors(self.location):
                return Path(download_artifacts(version.source, dst_path=str(folder), tracking_uri=self.location.uri))
        except MlflowException as error:
            raise LostFiles(f"{self.location} has no files of {version}; judge it again with stage=evaluate") from error


class MlflowStore(RegistryReader):
    def __init__(self, location: Location) -> None:
        """Open or create the store. Raises UserError for a copy or a deleted experiment."""
        self.lock = location.lock
        try:
            self.lock.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{location}: {self.lock.parent} cannot be made ({error.strerror}); name another") from error
        with locked(self.lock, "opening MLflow's store"):  # concurrent creation of a SQLite store breaks its migrations
            super().__init__(location)
            self.experiment_id = self._experiment()
            with suppress(MlflowException):  # it exists already
                description = "Engines with a quantized KV cache; the alias champion serves."
                self.client.create_registered_model(location.model_name, description=description)

    def _experiment(self) -> str:
        name = self.location.experiment
        with suppress(MlflowException):  # another host created it first
            if self.client.get_experiment_by_name(name) is None:
                self.client.create_experiment(name, self.location.artifact_root)
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None or experiment.lifecycle_stage == "deleted":
            raise UserError(f"tracking.experiment={name} was deleted in MLflow: restore it or give another name")
        if not experiment.experiment_id:
            raise UserError(f"{self.location} is not an MLflow server; give a server's root URL")
        check_files(self.location, str(experiment.artifact_location))
        return str(experiment.experiment_id)

    # Runs

    def register(
        self, candidate: Candidate, rows: Sequence[SampleRow] = (), *, sweep: str, config: Mapping[str, object]
    ) -> Candidate:
        """Register an engine, and log its verdict, metrics and answers; return the candidate with its run and version."""
        tables = {name: table for name, table in run_content.run_tables(candidate, rows).items() if table}
        model, about = self.location.model_name, run_content.description(candidate)
        checkpoint = {} if candidate.checkpoint is None else {"checkpoint_digest": candidate.checkpoint}
        run_id = self._begin_run(f"{candidate.name}: {candidate.verdict}", sweep, {**candidate.citations, **checkpoint})
        version = self._add_version(candidate, run_id)
        fetch = f"mlflow artifacts download --artifact-uri models:/{model}/{version} --dst-path engine"
        tags = {
            "kv": candidate.name,
            "backend": candidate.backend,
            "verdict": candidate.verdict,
            "reasons": "; ".join(candidate.reasons),
            "model_version": version,
            "mlflow.runColor": run_content.COLOURS.get(candidate.verdict, run_content.UNDECIDED),
            "mlflow.note.content": f"{about}\n\nRegistered as version {version} of `{model}`:\n\n```sh\n{fetch}\n```",
            # MLflow's own `log_table` sends eight requests per table.
            "mlflow.loggedArtifacts": json.dumps([{"path": name, "type": "table"} for name in tables]),
        }
        params = [Param(name, value) for name, value in run_content.flat_params(config).items()]
        shown = [RunTag(name, redact_text(value)) for name, value in tags.items()]
        self.client.log_batch(run_id, params=params, tags=shown)
        for name, table in tables.items():
            self.client.log_text(run_id, run_content.table_text(table), name)
        self.attach(run_id, [candidate.report.path])
        self.client.set_terminated(run_id, "FINISHED")
        self._show_baseline(candidate, sweep)
        return candidate.model_copy(update={"run_id": run_id, "version": version})

    def _begin_run(self, title: str, sweep: str, tags: Mapping[str, str]) -> str:
        """Create a run and return its id. It counts as FAILED until it is complete, so a killed command leaves no open run."""
        owned = {**tags, "sweep": sweep, "mlflow.user": run_content.author(), "mlflow.source.name": "kvgate"}
        safe = {name: redact_text(value) for name, value in owned.items()}
        run_id = str(self.client.create_run(self.experiment_id, tags=safe, run_name=redact_text(title)).info.run_id)
        self.client.set_terminated(run_id, "FAILED")
        return run_id

    def _log_metrics(self, run_id: str, metrics: Mapping[str, float], model_id: str | None = None) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(run_id, metrics=[Metric(name, value, now, 0, model_id) for name, value in metrics.items()])

    def _show_baseline(self, candidate: Candidate, sweep: str) -> None:
        """Log the FP16 engine as a run of the sweep, for MLflow's charts, unless another candidate already did."""
        metrics = run_content.baseline_metrics(candidate)
        if not metrics:
            return
        tags = {"baseline_digest": candidate.baseline.digest, "verdict": "baseline"}
        wanted = [f"tags.{name} = '{value}'" for name, value in {"sweep": sweep, **tags}.items()]
        query = " and ".join(["attributes.status = 'FINISHED'", *wanted])
        with locked(self.lock, "logging the baseline"):
            if not self.client.search_runs([self.experiment_id], query, max_results=1):
                run_id = self._begin_run("fp16: baseline", sweep, {**tags, "mlflow.runColor": run_content.UNDECIDED})
                self._log_metrics(run_id, metrics)
                self.client.set_terminated(run_id, "FINISHED")

    def attach(self, run_id: str, files: Sequence[Path]) -> None:
        """Log files as artifacts of a run, with secrets removed. The run may have ended."""
        with tempfile.TemporaryDirectory() as scratch:
            for path in files:
                run_content.copy_redacted(path, Path(scratch) / path.name)
            self.client.log_artifacts(run_id, scratch)

    # Engines

    def _add_version(self, candidate: Candidate, run_id: str) -> str:
        """Log the engine's metrics, and register it unless an equal version exists; return the version."""
        tags = {"kv": candidate.name, "verdict": candidate.verdict, IDENTITY_TAG: candidate.identity.digest}
        query = " and ".join(f"tags.{name} = '{value}'" for name, value in tags.items())
        model_name = self.location.model_name
        with locked(self.lock, "registering an engine"):
            versions = self.client.search_model_versions(f"name = '{model_name}' and {query}", max_results=1)
            metrics = run_content.candidate_metrics(candidate)
            if versions:
                version = version_of(versions[0])
                self._log_metrics(run_id, metrics, version.model_id)
            else:
                model = self._log_model(candidate, run_id, {**tags, **candidate.citations})
                self._log_metrics(run_id, metrics, model.model_id)  # first: a killed command's version is used with its run
                place, description = model.artifact_location, redact_text(run_content.description(candidate))
                created = self.client.create_model_version(
                    model_name, place, run_id, tags, description=description, model_id=model.model_id
                )
                version = version_of(created)
            registered = json.dumps([{"name": model_name, "version": version.number}])
            self.client.set_logged_model_tags(version.model_id, {"mlflow.modelVersions": registered})
            self._nominate(candidate, version.number)
        self.client.log_outputs(run_id, [LoggedModelOutput(version.model_id, 0)])
        return version.number

    def _nominate(self, candidate: Candidate, version: str) -> None:
        """Set the alias `candidate` to a version unless it failed; after a FAIL, remove the alias from the same engine."""
        if candidate.verdict != "FAIL":
            self.set_alias("candidate", version)
            return
        nominated = self.read().pointed_at.get("candidate")
        if nominated is not None and self.judged_by(nominated).tags.get("engine_digest") == candidate.engine.digest:
            self.set_alias("candidate", None)

    def _log_model(self, candidate: Candidate, run_id: str, tags: Mapping[str, str]) -> LoggedModel:
        model: LoggedModel = self.client.create_logged_model(
            self.experiment_id, candidate.policy, run_id, dict(tags), model_type="engine"
        )
        status: Literal["READY", "FAILED"] = "FAILED"
        try:
            with tempfile.TemporaryDirectory() as scratch:
                run_content.collect_evidence(candidate, Path(scratch))
                self.client.log_model_artifacts(model.model_id, scratch)
            if self.location.log_bundle:
                self.client.log_model_artifacts(model.model_id, str(candidate.engine.path), "engine")
            status = "READY"
        finally:
            self.client.finalize_logged_model(model.model_id, status)
        return model

    # Versions, tags and aliases

    def set_alias(self, alias: str, version: str | None) -> None:
        """Point an alias at a version; None removes the alias."""
        if version is None:
            self.client.delete_registered_model_alias(self.location.model_name, alias)
        else:
            self.client.set_registered_model_alias(self.location.model_name, alias, version)

    def set_tags(self, version: str, tags: Mapping[str, str | None]) -> None:
        """Set tags of a version; None deletes a tag. Deletions come first, since a version has at most six tags."""
        for name, value in sorted(tags.items(), key=lambda tag: tag[1] is not None):
            if value is None:
                self.client.delete_model_version_tag(self.location.model_name, version, name)
            else:
                self.client.set_model_version_tag(self.location.model_name, version, name, redact_text(value))

    def set_left(self, workload: str, versions: set[str]) -> None:
        """Record the broken versions that the route of a class has moved away from."""
        self.client.set_registered_model_tag(self.location.model_name, f"{LEFT}{workload}", ",".join(sorted(versions)))


def version_of(entry: Any) -> Version:
    return Version(
        str(entry.version), dict(entry.tags), str(entry.run_id or ""), entry.creation_timestamp / 1000, str(entry.source or "")
    )
