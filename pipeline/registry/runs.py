"""A candidate's run in the tracking store. MLflow is imported only when a store is opened."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.registry.contents import EMPTY_PAGE, RunPage
from pipeline.registry.summary import Candidate
from pipeline.registry.tracking import Tracking, locate

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore


@dataclass(frozen=True)
class CandidateRun:
    """A candidate's run while it is open. Without a store (`tracking.enabled=false`) nothing is logged, nothing registered."""

    store: "MlflowStore | None" = None
    run_id: str = ""

    def stage(self, name: str, params: Mapping[str, object], *, digest: str, seconds: float) -> None:
        """Log a stage that the run made, as a child run; what was reused, the identity names."""
        if self.store is not None:
            self.store.log_stage(self.run_id, name, params, digest=digest, seconds=seconds)

    def conclude(self, candidate: Candidate, page: RunPage = EMPTY_PAGE) -> Candidate:
        """Register the engine, and log its verdict and what its run shows; return the candidate with its registration."""
        if self.store is None:
            return candidate
        return candidate.model_copy(update={"registration": self.store.conclude(self.run_id, candidate, page)})


@contextmanager
def track(
    store: "MlflowStore | None", sweep: str, kv: str, backend: str, config: Mapping[str, object]
) -> Iterator[CandidateRun]:
    """Open a candidate's run while the block runs."""
    if store is None:
        yield CandidateRun()
        return
    with store.candidate(sweep, kv, backend, config) as run_id:
        yield CandidateRun(store, run_id)


def open_store(tracking: Tracking, workdir: Path, model: str) -> "MlflowStore | None":
    """Open the tracking store of a model; None when tracking is off.

    Imports MLflow, which takes 2 s. Raises UserError when the store cannot be opened.
    """
    if not tracking.enabled:
        return None
    location = locate(tracking, workdir, model)
    from pipeline.registry.mlflow_store import MlflowStore

    return MlflowStore(location)
