"""One job of a command: its configuration, its artifacts, and the signing keys and gates that apply."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.chain.judge import Chain
from pipeline.cli import console
from pipeline.config.config import Config
from pipeline.evidence.reading import registered_engine
from pipeline.evidence.verify import replay
from pipeline.registry.promotion import Engines
from pipeline.registry.tracking import Tracking, locate
from pipeline.store.store import Store
from stages.core.errors import UserError
from stages.verdict.gates import decide
from stages.verdict.report import EvaluationReport, SampleRow
from stages.verdict.thresholds import Verdict

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore


@cache
def open_store(tracking: Tracking, workdir: Path, model: str) -> "MlflowStore | None":
    """Open a model's tracking store once; return None if tracking is off. Importing MLflow takes 2 s."""
    if not tracking.enabled:
        return None
    location = locate(tracking, workdir, model)
    from pipeline.registry.mlflow_store import MlflowStore

    return MlflowStore(location)


@dataclass
class Run:
    """One job: its configuration, its chain of artifacts, and the sweep that it belongs to."""

    config: Config
    sweep: str = ""
    sweeping: bool = False
    label: str = ""
    """Display name of the candidate, unique within the sweep: the policy and the other overrides."""

    @cached_property
    def chain(self) -> Chain:
        return Chain(self.config, Store(self.config.work / "artifacts"))

    def registry(self) -> "MlflowStore":
        """Open the registry. Raises UserError if tracking is off."""
        with console.doing("opening MLflow"):
            store = open_store(self.config.tracking, self.config.work, self.config.model.label)
        if store is None:
            raise UserError(f"tracking.enabled=false: stage={self.config.stage} needs the registry; leave tracking on")
        return store

    def engines(self) -> Engines:
        """Return the registered engines, with their evidence in the work directory. Raises as `registry` does."""
        check = partial(replay, signing=self.config.signing)
        return Engines(self.registry(), partial(registered_engine, self.config.work / "artifacts", check), self.decide)

    def decide(self, report: EvaluationReport, rows: Sequence[SampleRow]) -> Verdict:
        """Return the verdict of this command's gates."""
        return decide(report, rows, self.config.gates)
