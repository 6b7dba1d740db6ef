"""A work directory after several evaluations, with its registry."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from helpers.commands.jobs import run_job
from helpers.registry.judged_engine import SAMPLES, candidate_of, config_of, judged_engine
from pipeline.config.config import Config, Tracking
from pipeline.registry import summary
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.tracking import locate
from stages.verdict.candidate import Candidate


@dataclass
class JudgedWork:
    work: Path
    uri: str | None = None
    """The tracking store, which work directories may share; None for a store in the work directory."""
    log_bundle: bool = False

    @property
    def artifacts(self) -> Path:
        return self.work / "artifacts"

    @cached_property
    def store(self) -> MlflowStore:
        return MlflowStore(locate(Tracking(uri=self.uri, log_bundle=self.log_bundle), self.work, "some-llm", {}))

    def judge(self, kv: str, *workloads: str, sweep: str = "", **measured: object) -> Candidate:
        """Judge and register an engine, leaving the same files as `stage=evaluate`. `measured` are fields of the report."""
        evidence = judged_engine(self.artifacts, workloads or SAMPLES, kv=kv, measured=measured)
        candidate = candidate_of(evidence).model_copy(update={"version": ""})
        sweep = sweep or kv
        registered = self.store.register(candidate, sweep=sweep, config={})
        summary.begin(self.work, sweep, [registered.name])
        summary.record(self.work, sweep, registered)
        summary.finish(self.work, sweep, 0)
        return registered

    def config(self, *overrides: str) -> Config:
        uri = [] if self.uri is None else [f"tracking.uri={self.uri}"]
        given = [f"workdir={self.work}", "model.path=/models/some-llm", *uri, *overrides]
        return config_of(*{override.partition("=")[0]: override for override in given}.values())

    def command(self, *overrides: str) -> None:
        """Run a stage in this process."""
        run_job(self.config(*overrides), "20260105-000000-1-e")

    def promote(self, kv: str, sweep: str = "") -> None:
        self.command("stage=promote", f"promote.sweep={sweep or kv}", f"promote.name={kv}")

    def alias(self, name: str) -> str | None:
        version = self.store.read().pointed_at.get(name)
        return None if version is None else version.name
