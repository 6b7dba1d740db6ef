"""The runs of an experiment of the tracking store. Importing it imports MLflow, which takes 2 s: import it inside functions.

A run that is open holds a lock, whose name is a tag of the run. The system lets go of the lock when the process dies, so that
a run which is RUNNING without its lock was left by a dead process; the next command that opens the store closes it.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from getpass import getuser
from pathlib import Path
from secrets import token_hex

from pipeline.artifacts.locks import locked, locked_at_once
from pipeline.core.redaction import clip, copy_redacted, finite_metrics, redact_text, table_columns
from pipeline.registry.contents import RunPage, Workload
from pipeline.registry.mlflow_client import Client, Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from pipeline.registry.tracking import Location

TAG_CHARS = 5000
DIGEST_CHARS = 36
"""The longest digest of a data set that MLflow takes."""
LOCK = "lock"
"""Tag of a run with the name of its lock, a file of `Location.runs`."""


class ExperimentRuns:
    """The runs of one experiment."""

    location: Location
    client: Client
    experiment_id: str

    @contextmanager
    def recorded(self, title: str, tags: Mapping[str, str]) -> Iterator[str]:
        """Open a run while the block runs and yield its id. It ends as FAILED after an exception, KILLED after Ctrl-C."""
        lock = self._locks / token_hex(8)
        with ExitStack() as stack:
            with locked(self.location.lock, "beginning a run"):
                lock.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked_at_once(lock))
            status = "FAILED"
            try:
                texts = {name: clip(redact_text(text), TAG_CHARS) for name, text in {**tags, LOCK: lock.name}.items()}
                yield self.create_run(title, texts)
                status = "FINISHED"
            except (KeyboardInterrupt, SystemExit):
                status = "KILLED"
                raise
            finally:
                self._close(lock, status)

    @property
    def _locks(self) -> Path:
        return self.location.runs / self.experiment_id

    def _close(self, lock: Path, status: str) -> None:
        """Close the run with this lock, if it is open still."""
        query = f"attributes.status = 'RUNNING' and tags.{LOCK} = '{lock.name}'"
        for run in self.client.search_runs([self.experiment_id], query):
            self.client.set_terminated(run.info.run_id, status)
        lock.unlink(missing_ok=True)

    def close_left_open(self) -> None:
        """Close the runs whose process died. Those of other work directories and other programs are not known to be dead."""
        with locked(self.location.lock, "closing runs"):
            for lock in self._locks.glob("*"):
                with locked_at_once(lock) as died:
                    if died:
                        self._close(lock, "KILLED")

    def create_run(self, title: str, tags: Mapping[str, str], start_ms: int | None = None) -> str:
        """Create a run and return its id."""
        owner = {"mlflow.user": getuser(), "mlflow.source.name": "kvgate"}
        return str(self.client.create_run(self.experiment_id, start_ms, {**tags, **owner}, run_name=title).info.run_id)

    def attach(self, run_id: str, files: Sequence[Path]) -> None:
        """Log files as artifacts of a run, even of one that has ended. They lose their secrets."""
        with tempfile.TemporaryDirectory() as scratch:
            for path in files:
                copy_redacted(path, Path(scratch) / path.name)
            self.client.log_artifacts(run_id, scratch)

    def log(
        self,
        run_id: str,
        params: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        model_id: str | None = None,
    ) -> None:
        """Log all of it in one batch, or in as many as MLflow takes."""
        now = int(time.time() * 1000)
        self.client.log_batch(
            run_id,
            metrics=[Metric(name, value, now, 0, model_id) for name, value in (metrics or {}).items()],
            params=[Param(name, value) for name, value in (params or {}).items()],
            tags=[RunTag(name, clip(redact_text(value), TAG_CHARS)) for name, value in (tags or {}).items()],
        )

    def show(self, run_id: str, page: RunPage, tags: Mapping[str, str], model_id: str) -> None:
        """Log what a candidate's run shows, and tags, in an order that MLflow keeps."""
        if page.workloads:
            self.client.log_inputs(run_id, [_dataset(workload) for workload in page.workloads])
        finite, nonfinite = finite_metrics(page.metrics)
        tags_of_metrics = {"nonfinite": ", ".join(nonfinite)} if nonfinite else {}
        self.log(run_id, metrics=finite, tags={**tags, **tags_of_metrics}, model_id=model_id)
        for name, rows in page.tables.items():
            if rows:
                self.client.log_table(run_id, table_columns(rows), name)


def _dataset(workload: Workload) -> DatasetInput:
    """Return a kind of work as MLflow has data sets; its samples were generated or given, and are in no file of the store."""
    profile = {"num_rows": workload.samples, "documents": workload.documents, "scored_tokens": workload.scored_tokens}
    source = json.dumps({"tags": {"mlflow.source.name": "kvgate", "workloads_digest": workload.digest}})
    dataset = Dataset(redact_text(workload.name), workload.digest[:DIGEST_CHARS], "code", source, profile=json.dumps(profile))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "evaluation")])
