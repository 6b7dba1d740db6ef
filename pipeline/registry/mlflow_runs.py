"""The runs of an experiment of the tracking store. Importing it imports MLflow, which takes 2 s: import it inside functions."""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from getpass import getuser
from pathlib import Path

from pipeline.core.redaction import clip, copy_redacted, finite_metrics, redact_text, table_columns
from pipeline.registry import processes
from pipeline.registry.contents import RunPage, Workload
from pipeline.registry.mlflow_client import Client, Dataset, DatasetInput, InputTag, Metric, MlflowException, Param, RunTag

PARAMS_PER_BATCH, METRICS_PER_BATCH, TAG_CHARS = 100, 1000, 5000
DIGEST_CHARS = 36
"""The longest digest of a data set that MLflow takes."""
VIEW = "mlflow.sharedViewState."
"""Tags of an experiment with this prefix are views of its page of runs."""


class ExperimentRuns:
    """The runs of one experiment."""

    client: Client
    experiment_id: str

    def _reap(self) -> None:
        """Close the runs whose process died without closing them, on whatever machine."""
        for run_id in left_open(self.client, self.experiment_id):
            self.client.set_terminated(run_id, "KILLED")

    @contextmanager
    def recorded(self, title: str, tags: Mapping[str, str]) -> Iterator[str]:
        """Open a run while the block runs and yield its id. It ends as FAILED after an exception, KILLED after Ctrl-C."""
        texts = {name: clip(redact_text(text), TAG_CHARS) for name, text in tags.items()}
        run_id = self.client.create_run(self.experiment_id, tags={**texts, **self.owner()}, run_name=title).info.run_id
        status = "FAILED"
        try:
            with processes.leased(lambda tags: self._put_off(run_id, tags)):
                yield run_id
            status = "FINISHED"
        except (KeyboardInterrupt, SystemExit):
            status = "KILLED"
            raise
        finally:
            self.client.set_terminated(run_id, status)

    def _put_off(self, run_id: str, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self.client.set_tag(run_id, name, value)

    def attach(self, run_id: str, files: Sequence[Path]) -> None:
        """Log files as artifacts of a run, even of one that has ended. They lose their secrets."""
        with tempfile.TemporaryDirectory() as scratch:
            for path in files:
                copy_redacted(path, Path(scratch) / path.name)
            self.client.log_artifacts(run_id, scratch)

    def owner(self) -> dict[str, str]:
        """Return the tags that say who makes a run."""
        return {"mlflow.user": getuser(), "mlflow.source.name": "kvgate", **processes.identity(), **processes.lease()}

    def log(
        self,
        run_id: str,
        params: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        model_id: str | None = None,
    ) -> None:
        """Log all of it in one batch, in more only beyond MLflow's limits."""
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

    def show(self, run_id: str, page: RunPage, tags: Mapping[str, str], model_id: str) -> None:
        """Log what a candidate's run shows, and tags, in an order that MLflow keeps."""
        if page.workloads:
            self.client.log_inputs(run_id, [_dataset(workload) for workload in page.workloads])
        finite, nonfinite = finite_metrics(page.metrics)
        named = {"nonfinite": ", ".join(nonfinite)} if nonfinite else {}
        self.log(run_id, metrics=finite, tags={**tags, **named}, model_id=model_id)
        for name, rows in page.tables.items():
            if rows:
                self.client.log_table(run_id, table_columns(rows), name)

    def save_view(self, name: str, content: str) -> None:
        """Save a view of the experiment's page of runs."""
        self.client.set_experiment_tag(self.experiment_id, VIEW + name, content)

    def views(self) -> dict[str, str]:
        """Return the content of every saved view by its name, whoever saved it."""
        tags: Mapping[str, str] = self.client.get_experiment(self.experiment_id).tags
        return {key.removeprefix(VIEW): content for key, content in tags.items() if key.startswith(VIEW)}

    def remove_view(self, name: str) -> None:
        """Remove a saved view; another command may have done so already."""
        try:
            self.client.delete_experiment_tag(self.experiment_id, VIEW + name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise


def left_open(client: Client, experiment_id: str) -> dict[str, str]:
    """Return the names of the runs that are RUNNING although their process died, by their ids."""
    runs = client.search_runs([experiment_id], "attributes.status = 'RUNNING'", max_results=1000)
    dead = [run.info.run_id for run in runs if processes.abandoned(run.data.tags)]
    # Read again: a process may have closed its run after the search, and ended before it was asked for.
    again = [client.get_run(run_id).info for run_id in dead]
    return {info.run_id: info.run_name or info.run_id for info in again if info.status == "RUNNING"}


def _dataset(workload: Workload) -> DatasetInput:
    """Return a kind of work as MLflow has data sets; its samples were generated or given, and are in no file of the store."""
    profile = {"num_rows": workload.samples, "documents": workload.documents, "scored_tokens": workload.scored_tokens}
    source = json.dumps({"tags": {"mlflow.source.name": "kvgate", "workloads_digest": workload.digest}})
    dataset = Dataset(redact_text(workload.name), workload.digest[:DIGEST_CHARS], "code", source, profile=json.dumps(profile))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "evaluation")])
