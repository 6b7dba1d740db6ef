"""The tracking store. Importing it imports MLflow, which takes 2 s: import it inside functions.

A candidate is a top-level run, because nested runs collapse in MLflow's charts. The run's name ends with the verdict, because
MLflow's list of runs shows no tags by default. Every FP16 engine of a sweep is also a run. An open run holds a lock, whose name
is a tag of the run. The system releases the lock when the process dies, so a run that is RUNNING without its lock belongs to a
dead process. The next command that opens the store closes it.

An engine with its evidence is a logged model and a version of the registered model. Both are looked up by the digests of the
evidence, so judging the same engine again, in any sweep, does not create a second version.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from getpass import getuser
from pathlib import Path
from secrets import token_hex
from typing import Literal

from mlflow.entities import LoggedModel, LoggedModelOutput, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from pipeline.registry import pages
from pipeline.registry.mlflow_client import Client, path_of, version_of
from pipeline.registry.reaching import named
from pipeline.registry.tracking import IDENTITY_TAG, LEFT, Location, RegisteredModel
from pipeline.store.locks import locked, locked_at_once
from stages.core.errors import UserError
from stages.core.redaction import clip, copy_redacted, flat_params, redact_text, table_text
from stages.verdict.candidate import Candidate
from stages.verdict.report import SampleRow

TAG_CHARS = 5000
OLD = ("mlflow.kvgate.", "move-")
"""Prefixes of tags that older releases wrote to the registered model."""
LOCK = "lock"
"""Tag of a run with the name of its lock, a file in `Location.runs`."""


class MlflowStore:
    """One experiment and one registered model. Implements `pipeline.registry.promotion.Registry`."""

    def __init__(self, location: Location) -> None:
        """Open the store; create its experiment and registered model if missing; close runs of dead processes.

        Raises:
            UserError: the store cannot be opened, or its files were moved.
            MissingRequirement: the store does not answer, is locked, or needs a driver that is not installed.
        """
        self.location, self.lock = location, location.lock
        try:
            self.lock.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{named(location)}: {self.lock.parent} cannot be made ({error.strerror}); name another") from error
        with locked(self.lock, "opening MLflow's store"):  # concurrent creation of a SQLite store breaks its migrations
            self.client = Client(location)
            self.experiment_id = self._experiment()
            with suppress(MlflowException):  # it exists already
                said = "Engines with a quantized KV cache; the alias champion serves."
                self.client.create_registered_model(location.model_name, description=said)
            if any(name.startswith(OLD) for name in self.client.get_registered_model(location.model_name).tags):
                raise UserError(
                    f"{named(location)}: an older kvgate moved the aliases of {location.model_name}, by a log that this kvgate "
                    "does not read; register in another model: tracking.model_name=NAME"
                )
        self._locks = location.runs / self.experiment_id
        with locked(self.lock, "closing runs"):  # of dead processes; other work directories' runs are unknown
            for lock in self._locks.glob("*"):
                with locked_at_once(lock) as died:
                    if died:
                        self._close(lock, "KILLED")

    def _experiment(self) -> str:
        name = self.location.experiment
        with suppress(MlflowException):  # another host created it first
            if self.client.get_experiment_by_name(name) is None:
                self.client.create_experiment(name, self.location.artifact_root)
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None or not isinstance(experiment.artifact_location, str):
            what = "is neither active nor deleted" if experiment is None else "has no artifact_location"
            raise UserError(f"{named(self.location)}: the experiment {name} {what}; correct it, or name another store")
        if experiment.lifecycle_stage != "active":
            raise UserError(f"tracking.experiment={name} was deleted in MLflow: restore it or give another name")
        _check_files(self.location, experiment.artifact_location)
        return str(experiment.experiment_id)

    # Runs

    @contextmanager
    def candidate(self, sweep: str, kv: str, backend: str, config: Mapping[str, object]) -> Iterator[str]:
        """Open a candidate's run for the block and yield its id. Its configuration is logged without secrets.

        The run ends as FAILED after an exception, as KILLED after Ctrl-C.
        """
        lock = self._locks / token_hex(8)
        with ExitStack() as stack:
            with locked(self.lock, "beginning a run"):
                lock.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked_at_once(lock))
            status = "FAILED"
            try:
                tags = {"sweep": sweep, "kv": kv, "backend": backend, LOCK: lock.name, "mlflow.runColor": pages.UNDECIDED}
                run_id = self.create_run(kv, {name: clip(redact_text(text), TAG_CHARS) for name, text in tags.items()})
                self._log(run_id, params=config)
                yield run_id
                status = "FINISHED"
            except (KeyboardInterrupt, SystemExit):
                status = "KILLED"
                raise
            finally:
                self._close(lock, status)

    def _close(self, lock: Path, status: str) -> None:
        """Close the open runs with this lock: the candidate's, and the baseline's if it is open."""
        query = f"attributes.status = 'RUNNING' and tags.{LOCK} = '{lock.name}'"
        for run in self.client.search_runs([self.experiment_id], query):
            self.client.set_terminated(run.info.run_id, status)
        lock.unlink(missing_ok=True)

    def create_run(self, title: str, tags: Mapping[str, str]) -> str:
        owner = {"mlflow.user": getuser(), "mlflow.source.name": "kvgate"}
        return str(self.client.create_run(self.experiment_id, tags={**tags, **owner}, run_name=title).info.run_id)

    def attach(self, run_id: str, files: Sequence[Path]) -> None:
        """Log files as artifacts of a run, with secrets removed. The run may have ended."""
        with tempfile.TemporaryDirectory() as scratch:
            for path in files:
                copy_redacted(path, Path(scratch) / path.name)
            self.client.log_artifacts(run_id, scratch)

    def _log(
        self,
        run_id: str,
        params: Mapping[str, object] | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        model_id: str | None = None,
    ) -> None:
        """Log parameters, metrics and tags in one batch, which MLflow splits if necessary."""
        now = int(time.time() * 1000)
        self.client.log_batch(
            run_id,
            metrics=[Metric(name, value, now, 0, model_id) for name, value in (metrics or {}).items()],
            params=[Param(name, value) for name, value in flat_params(params or {}).items()],
            tags=[RunTag(name, clip(redact_text(value), TAG_CHARS)) for name, value in (tags or {}).items()],
        )

    def conclude(self, run_id: str, candidate: Candidate, rows: Sequence[SampleRow] = ()) -> Candidate:
        """Register an engine and log its verdict, metrics, answers and checks; return the candidate with its version."""
        version, model_id = self._register(candidate, run_id)
        tables = {name: table for name, table in pages.run_tables(candidate, rows).items() if table}
        model, about = self.location.model_name, pages.description(candidate)
        fetch = f"mlflow artifacts download --artifact-uri models:/{model}/{version} --dst-path engine"
        tags = {
            "verdict": candidate.verdict,
            "reasons": "; ".join(candidate.reasons),
            **candidate.citations,
            "model_version": version,
            "mlflow.runName": f"{candidate.name}: {candidate.verdict}",
            "mlflow.runColor": pages.COLOURS.get(candidate.verdict, pages.UNDECIDED),
            "mlflow.note.content": f"{about}\n\nRegistered as version {version} of `{model}`:\n\n```sh\n{fetch}\n```",
            # MLflow's own `log_table` sends eight requests per table.
            "mlflow.loggedArtifacts": json.dumps([{"path": name, "type": "table"} for name in tables]),
        }
        self._log(run_id, metrics=pages.chosen(candidate), tags=tags, model_id=model_id)
        for name, table in tables.items():
            self.client.log_text(run_id, table_text(table), name)
        self.attach(run_id, [candidate.report.path])
        baseline = pages.of_baseline(candidate)
        if baseline:
            self._show_baseline(self.client.get_run(run_id).data.tags, candidate.baseline.digest, baseline)
        return candidate.model_copy(update={"run_id": run_id, "version": version})

    def _show_baseline(self, own: Mapping[str, str], digest: str, metrics: Mapping[str, float]) -> None:
        """Log the FP16 engine as a run of the sweep, for MLflow's charts, unless another candidate already did.

        `own` are the tags of the candidate's run. They give the sweep, and the lock that both runs share.
        """
        tags = {"sweep": own["sweep"], "baseline_digest": digest, "verdict": "baseline"}
        query = " and ".join(["attributes.status = 'FINISHED'", *(f"tags.{name} = '{value}'" for name, value in tags.items())])
        with locked(self.lock, "logging the baseline"):
            if not self.client.search_runs([self.experiment_id], query, max_results=1):
                run_id = self.create_run("fp16: baseline", {**tags, LOCK: own[LOCK], "mlflow.runColor": pages.UNDECIDED})
                self._log(run_id, metrics=metrics)
                self.client.set_terminated(run_id, "FINISHED")

    # Engines

    def _register(self, candidate: Candidate, run_id: str) -> tuple[str, str]:
        """Register the engine with its evidence, unless a version with the same citations exists.

        The version becomes an output of the run `run_id`. The alias `candidate` moves to the version unless it failed. Return
        the version and the id of its logged model.
        """
        tags = {"kv": candidate.name, "verdict": candidate.verdict, IDENTITY_TAG: candidate.identity.digest}
        query = " and ".join(f"tags.{name} = '{value}'" for name, value in tags.items())
        model_name = self.location.model_name
        with locked(self.lock, "registering an engine"):
            versions = self.client.search_model_versions(f"name = '{model_name}' and {query}", max_results=1)
            if versions:
                version = version_of(versions[0])
            else:
                model = self._log_model(candidate, run_id, {**tags, **candidate.citations})
                place, said = model.artifact_location, redact_text(pages.description(candidate))
                created = self.client.create_model_version(
                    model_name, place, run_id, tags, description=said, model_id=model.model_id
                )
                version = version_of(created)
            registered = json.dumps([{"name": model_name, "version": version.number}])
            self.client.set_logged_model_tags(version.model_id, {"mlflow.modelVersions": registered})
            self._nominate(candidate, version.number)
        self.client.log_outputs(run_id, [LoggedModelOutput(version.model_id, 0)])
        return version.number, version.model_id

    def _nominate(self, candidate: Candidate, version: str) -> None:
        """Set the alias `candidate` to the version unless it failed. If it failed, remove the alias from the same engine."""
        if candidate.verdict != "FAIL":
            self.set_alias("candidate", version)
            return
        found = self.read().pointed_at.get("candidate")
        if found is None or not found.run_id:
            return
        if found.tags.get("verdict") == "FAIL" or self.client.engine_digest(found) == candidate.engine.digest:
            self.set_alias("candidate", None)

    def _log_model(self, candidate: Candidate, run_id: str, tags: Mapping[str, str]) -> LoggedModel:
        model = self.client.create_logged_model(self.experiment_id, candidate.policy, run_id, dict(tags), model_type="engine")
        status: Literal["READY", "FAILED"] = "FAILED"
        try:
            with tempfile.TemporaryDirectory() as scratch:
                pages.collect_evidence(candidate, Path(scratch))
                self.client.log_model_artifacts(model.model_id, scratch)
            if self.location.log_bundle:
                self.client.log_model_artifacts(model.model_id, str(candidate.engine.path), "engine")
            status = "READY"
        finally:
            self.client.finalize_logged_model(model.model_id, status)
        return model

    # Versions, tags and aliases

    def read(self) -> RegisteredModel:
        """Return the current state of the registered model."""
        return self.client.model(self.location.model_name)

    def set_alias(self, alias: str, version: str | None) -> None:
        if version is None:
            self.client.delete_registered_model_alias(self.location.model_name, alias)
        else:
            self.client.set_registered_model_alias(self.location.model_name, alias, version)

    def set_tags(self, version: str, tags: Mapping[str, str | None]) -> None:
        for name, value in sorted(tags.items(), key=lambda tag: tag[1] is not None):
            if value is None:
                self.client.delete_model_version_tag(self.location.model_name, version, name)
            else:
                self.client.set_model_version_tag(self.location.model_name, version, name, redact_text(value))

    def set_left(self, workload: str, versions: set[str]) -> None:
        self.client.set_registered_model_tag(self.location.model_name, f"{LEFT}{workload}", ",".join(sorted(versions)))


def _check_files(location: Location, address: str) -> None:
    """Refuse a store whose files were moved without it, and a copy of a SQLite store. The store has absolute addresses."""
    if location.artifact_root is None or address == location.artifact_root or not address.startswith("file:"):
        return
    old, new = path_of(address), path_of(location.artifact_root)
    if new.is_dir() and not old.exists():
        raise UserError(
            f"{named(location)} has its files in {old}, which was moved to {new}: move it back, or let the old path lead to "
            f"the new one: mkdir -p {old.parent} && ln -s {new} {old}"
        )
    if location.file is not None and location.file.parent == new.parent and old.resolve() != new.resolve():
        raise UserError(
            f"{named(location)} is a copy, which would write into the original's files in {old}: give the original's workdir, "
            f"or begin a store here: rm -r {location.file} {new}"
        )
