"""The tracking store. The only module that imports MLflow; import it where it is used (it takes 2 s).

A candidate is a top-level run (nested candidates collapse in MLflow's charts), its stages are its children. An engine with
its evidence is a logged model and a version of the registered model, found again by its evidence's digests: judging the
same engine again, in any sweep, makes no second version.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from getpass import getuser
from pathlib import Path
from typing import Any
from zlib import crc32

from filelock import FileLock

# Read when MLflow is imported or first used.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # its own 7 take minutes to say that a server is down

from mlflow import MlflowClient, set_tracking_uri
from mlflow.entities import LoggedModelOutput, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from pipeline.core.errors import UserError
from pipeline.core.kv import POLICY_FILE, SCALES_FILE
from pipeline.core.redaction import clip, copy_redacted, finite_metrics, flat_params, redact, redact_text, table_columns
from pipeline.registry import processes
from pipeline.registry.summary import Candidate
from pipeline.registry.tracking import ENVIRONMENT, Location

PARAMS_PER_BATCH, METRICS_PER_BATCH, TAG_CHARS = 100, 1000, 5000
SHADES = {
    "PASS": ("#1a7f37", "#2da44e", "#0f766e", "#4d9221"),
    "FAIL": ("#cf222e", "#a40e26", "#e5534b", "#b35900"),
    "INCONCLUSIVE": ("#bf8700", "#d4a72c", "#9a6700", "#e0a800"),
}
"""Run colours: the verdict decides the hue, the policy's name the shade, so that charts can tell two passes apart."""
UNDECIDED = "#6e7781"
EVIDENCE_FILES = ("bundle.json", POLICY_FILE, SCALES_FILE)


def run_color(verdict: str, kv: str) -> str:
    shades = SHADES.get(verdict)
    return UNDECIDED if shades is None else shades[crc32(kv.encode()) % len(shades)]


class MlflowStore:
    """One experiment and one registered model; a `pipeline.registry.promotion.Registry`."""

    def __init__(self, location: Location) -> None:
        """Open the store, creating what is missing. Raises UserError when it cannot be opened."""
        for noisy in ("alembic", "mlflow.store.db.utils", "mlflow.store.model_registry.abstract_store"):
            logging.getLogger(noisy).setLevel(logging.WARNING)  # dozens of lines about a fresh file's migrations
        self.location = location
        self.lock = location.lock
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.lock):  # processes that create one SQLite store at once break its migrations
                self.client = MlflowClient(tracking_uri=location.uri, registry_uri=location.uri)
                self.experiment_id = self._experiment()
                self._registered_model()
        except MlflowException as error:
            reason = redact_text(str(error)).splitlines()[0]
            if location.served:
                reason = "no MLflow server answers there; start it, or name another"
            where = f"{redact_text(location.uri)} (tracking.uri or {ENVIRONMENT})"
            raise UserError(f"MLflow's store {where} cannot be used: {reason}") from error
        self._reap()

    def _experiment(self) -> str:
        name = self.location.experiment
        found = self.client.get_experiment_by_name(name)
        if found is None:
            return str(self.client.create_experiment(name, self.location.artifact_root))
        if found.lifecycle_stage != "active":
            raise UserError(f"tracking.experiment={name} was deleted in MLflow: restore it or give another name")
        return str(found.experiment_id)

    def _registered_model(self) -> None:
        try:
            self.client.get_registered_model(self.location.model_name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self.client.create_registered_model(
                self.location.model_name, description="Engines with a quantized KV cache; the alias champion serves."
            )

    def _reap(self) -> None:
        """Close runs of this host whose process died without closing them."""
        running = f"attributes.status = 'RUNNING' and tags.host = '{processes.host()}'"
        for run in self.client.search_runs([self.experiment_id], running, max_results=1000):
            if not processes.alive(run.data.tags):
                self.client.set_terminated(run.info.run_id, "KILLED")

    # Runs

    @contextmanager
    def candidate(self, sweep: str, kv: str, backend: str, config: Mapping[str, object]) -> Iterator["CandidateRun"]:
        """A candidate's run, open while the block runs: FAILED after an exception, KILLED after SIGTERM or Ctrl-C."""
        tags = {"sweep": sweep, "kv": kv, "backend": backend, "mlflow.runColor": UNDECIDED, **self._owner()}
        run_id = self.client.create_run(self.experiment_id, tags=tags, run_name=kv).info.run_id
        status = "FAILED"
        try:
            with processes.terminate_as_exit():
                self._log(run_id, params=flat_params(config))
                yield CandidateRun(self, run_id)
            status = "FINISHED"
        except (KeyboardInterrupt, SystemExit):
            status = "KILLED"
            raise
        finally:
            self.client.set_terminated(run_id, status)

    def attach(self, run_id: str, files: Sequence[Path]) -> None:
        """Log files as artifacts of a run, also of one that has ended: text without its secrets, plots as they are."""
        with tempfile.TemporaryDirectory() as scratch:
            for path in files:
                copy_redacted(path, Path(scratch) / path.name)
            self.client.log_artifacts(run_id, scratch)

    def _owner(self) -> dict[str, str]:
        return {"mlflow.user": getuser(), "mlflow.source.name": "kvgate", **processes.identity()}

    def _log(
        self,
        run_id: str,
        params: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        model_id: str | None = None,
    ) -> None:
        """One batch a call (more only beyond MLflow's limits)."""
        now = int(time.time() * 1000)
        all_params = [Param(name, value) for name, value in (params or {}).items()]
        all_metrics = [Metric(name, value, now, 0, model_id) for name, value in (metrics or {}).items()]
        all_tags = [RunTag(name, clip(redact_text(value), TAG_CHARS)) for name, value in (tags or {}).items()]
        assert len(all_metrics) <= METRICS_PER_BATCH, f"{len(all_metrics)} metrics in one step"
        for start in range(0, max(len(all_params), 1), PARAMS_PER_BATCH):
            first = start == 0
            self.client.log_batch(
                run_id,
                metrics=all_metrics if first else [],
                params=all_params[start : start + PARAMS_PER_BATCH],
                tags=all_tags if first else [],
            )

    # Engines

    def register(self, candidate: Candidate) -> tuple[str, str]:
        """(version, logged model id) of this engine with this evidence, made when there is none; `candidate` moves to it."""
        cited = {
            "kv": candidate.name,
            "verdict": candidate.verdict,
            "engine_digest": candidate.engine_digest,
            "baseline_digest": candidate.baseline_digest,
            "report_digest": candidate.report_digest,
            "identity_digest": candidate.identity_digest,
        }
        query = " and ".join(f"tags.{name} = '{value}'" for name, value in cited.items())
        with FileLock(self.lock), _process_wide(self.location.uri):
            found = self.client.search_model_versions(f"name = '{self.location.model_name}' and {query}", max_results=1)
            if found:
                version, model_id = str(found[0].version), found[0].tags["logged_model"]  # its own field comes back empty
            else:
                model_id = self._log_model(candidate, cited)
                tags = {**cited, "logged_model": model_id}
                made = self.client.create_model_version(
                    self.location.model_name, f"models:/{model_id}", candidate.run_id, tags, model_id=model_id
                )
                version = str(made.version)
            self.set_alias("candidate", version)
        assert candidate.run_id is not None
        self.client.log_outputs(candidate.run_id, [LoggedModelOutput(model_id, 0)])
        return version, model_id

    def _log_model(self, candidate: Candidate, cited: Mapping[str, str]) -> str:
        model = self.client.create_logged_model(
            self.experiment_id, candidate.kv, candidate.run_id, dict(cited), model_type="engine"
        )
        try:
            with tempfile.TemporaryDirectory() as scratch:
                _collect_evidence(candidate, Path(scratch))
                self.client.log_model_artifacts(model.model_id, scratch)
            if self.location.log_bundle:
                self.client.log_model_artifacts(model.model_id, candidate.engine_path, "engine")
        except BaseException:
            self.client.finalize_logged_model(model.model_id, "FAILED")
            raise
        self.client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    # Aliases

    def alias(self, alias: str) -> str | None:
        # Read by search_model_versions, aliases come back empty.
        found = self.client.get_registered_model(self.location.model_name).aliases.get(alias)
        return None if found is None else str(found)

    def set_alias(self, alias: str, version: str) -> None:
        self.client.set_registered_model_alias(self.location.model_name, alias, version)

    def delete_alias(self, alias: str) -> None:
        self.client.delete_registered_model_alias(self.location.model_name, alias)

    def tags(self, version: str) -> dict[str, str] | None:
        try:
            return dict(self.client.get_model_version(self.location.model_name, version).tags)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def set_tags(self, version: str, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self.client.set_model_version_tag(self.location.model_name, version, name, redact_text(value))


class CandidateRun:
    """A candidate's open run."""

    def __init__(self, store: MlflowStore, run_id: str) -> None:
        self.store = store
        self.run_id = run_id

    def stage(self, name: str, params: Mapping[str, object], *, digest: str, seconds: float, reused: bool) -> None:
        """A finished stage as a child run. `seconds` is what making its artifact took, also when it is reused."""
        client, end = self.store.client, int(time.time() * 1000)
        tags = {
            "mlflow.parentRunId": self.run_id,
            "stage": name,
            "artifact_digest": digest,
            "reused": str(reused).lower(),
            **self.store._owner(),
        }
        start = end if reused else end - int(seconds * 1000)
        child = client.create_run(self.store.experiment_id, start, tags, run_name=name).info.run_id
        self.store._log(child, params=flat_params(params), metrics={"perf/seconds": seconds})
        client.set_terminated(child, "FINISHED", end)

    def conclude(self, candidate: Candidate, rows: Sequence[Mapping[str, Any]] = (), files: Sequence[Path] = ()) -> Candidate:
        """Log the verdict, its metrics, tables and files, and register the engine: the candidate with run and version."""
        store, run_id = self.store, self.run_id
        candidate = replace(candidate, run_id=run_id)
        version, model_id = store.register(candidate)
        finite, nonfinite = finite_metrics({**candidate.metrics, "memory/kib_per_token": candidate.kib_per_token})
        tags = {
            "verdict": candidate.verdict,
            "reasons": "; ".join(candidate.reasons),
            "engine_digest": candidate.engine_digest,
            "baseline_digest": candidate.baseline_digest,
            "report_digest": candidate.report_digest,
            "identity_digest": candidate.identity_digest,
            "model_version": version,
            "mlflow.runColor": run_color(candidate.verdict, candidate.kv),
        }
        if nonfinite:
            tags["nonfinite"] = ", ".join(nonfinite)
        store._log(run_id, metrics=finite, tags=tags, model_id=model_id)
        store.attach(run_id, [Path(candidate.report_path), *files])
        if rows:
            store.client.log_table(run_id, table_columns(rows), "samples.json")
        return replace(candidate, model_version=version)


@contextmanager
def _process_wide(uri: str) -> Iterator[None]:
    """Make `uri` the process's store meanwhile: create_model_version looks `models:/<id>` up there, whatever its client says.

    MLflow also puts it into the environment, where the next work directory of this process would find it.
    """
    before = os.environ.get(ENVIRONMENT)
    set_tracking_uri(uri)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(ENVIRONMENT, None)
        else:
            os.environ[ENVIRONMENT] = before


def _collect_evidence(candidate: Candidate, folder: Path) -> None:
    """What a version carries even where the bundle itself is not copied: with `engine/`, what stage=verify replays.

    Not the user's own samples file: prompts stay where they are.
    """
    for name in EVIDENCE_FILES:
        source = Path(candidate.engine_path) / name
        if source.is_file():
            copy_redacted(source, folder / name)
    for path in map(Path, (candidate.report_path, candidate.samples_path, candidate.identity_path)):
        copy_redacted(path, folder / path.name)
    verdict = {"verdict": candidate.verdict, "reasons": list(candidate.reasons), "metrics": dict(candidate.metrics)}
    (folder / "verdict.json").write_text(json.dumps(redact(verdict), indent=2), encoding="utf-8")
