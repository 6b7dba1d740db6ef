"""The run of one job: its configuration, the steps whose artifacts it makes, and the registered engines."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.chain.engine_steps import EngineSteps
from pipeline.chain.verdict_steps import VerdictSteps
from pipeline.cli import tables
from pipeline.cli.progress import show_progress
from pipeline.config.config import Config, Tracking
from pipeline.evidence.verify import registered_engines
from pipeline.registry.promotion import Engines
from pipeline.registry.tracking import locate
from pipeline.store.store import Store
from stages.core.artifact import Artifact
from stages.core.errors import UserError

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore


@cache
def open_store(tracking: Tracking, workdir: Path, model: str) -> "MlflowStore | None":
    """Open a model's tracking store once; return None if tracking is off. Importing MLflow takes 2 s."""
    if not tracking.enabled:
        return None
    from pipeline.registry.mlflow_store import MlflowStore

    return MlflowStore(locate(tracking, workdir, model))


@dataclass
class Run:
    """The run of one job: its configuration, its steps and its sweep. A dry run has a store that makes nothing."""

    config: Config
    sweep: str = ""
    label: str = ""
    """Display name of the candidate, unique within the sweep: the policy and the other overrides."""

    arguments: Sequence[str] = ()
    """The user's arguments, which a next command repeats."""
    store: Store | None = None
    """The work directory's store if None."""

    @cached_property
    def engine_steps(self) -> EngineSteps:
        return EngineSteps(self.config, self.store or Store(self.config.artifacts))

    @cached_property
    def verdict_steps(self) -> VerdictSteps:
        return VerdictSteps(self.engine_steps)

    @cached_property
    def registry(self) -> "MlflowStore | None":
        """The model's tracking store; None if tracking is off."""
        with show_progress("opening MLflow"):
            return open_store(self.config.tracking, self.config.work, self.config.model.label)

    def make(self) -> Artifact:
        """Take the steps of a stage that makes artifacts; return the last artifact. Raises ValueError for other stages."""
        match self.config.facts.makes:
            case "exports":
                return self.engine_steps.exports(self.config.kv)
            case "bundle":
                return self.engine_steps.bundle(self.config.kv)
            case "report":
                return self.verdict_steps.report()
        raise ValueError(f"stage={self.config.stage} makes no artifacts")

    @contextmanager
    def engines(self, *, decides: bool = True) -> Iterator[Engines]:
        """Open the registered engines. Raises UserError if tracking is off. See `registered_engines`."""
        store = self.registry
        if store is None:
            raise UserError(f"tracking.enabled=false: stage={self.config.stage} needs the registry; leave tracking on")
        if not self.config.facts.judges:  # an evaluation named it already
            tables.print_registry(store.location)
        with registered_engines(store, self.config, decides=decides) as engines:
            yield engines
