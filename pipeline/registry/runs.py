"""A candidate's run in the tracking store, or one that logs nothing. MLflow is imported only when a store is opened."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipeline.registry.contents import EMPTY_PAGE, RunPage
from pipeline.registry.summary import Candidate
from pipeline.registry.tracking import Tracking, locate

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore


class Run(Protocol):
    """A candidate's run while it is open; `pipeline.registry.mlflow_store.CandidateRun` describes the methods."""

    def stage(self, name: str, params: Mapping[str, object], *, digest: str, seconds: float, reused: bool) -> None: ...

    def conclude(self, candidate: Candidate, page: RunPage = EMPTY_PAGE) -> Candidate: ...


class Untracked:
    """The run of `tracking.enabled=false`: nothing is logged, nothing registered."""

    def stage(self, name: str, params: Mapping[str, object], *, digest: str, seconds: float, reused: bool) -> None:
        """Log nothing."""

    def conclude(
        self,
        candidate: Candidate,
        page: RunPage = EMPTY_PAGE,  # noqa: ARG002
    ) -> Candidate:
        """Return the candidate as it is, without a registration."""
        return candidate


@contextmanager
def track(store: "MlflowStore | None", sweep: str, kv: str, backend: str, config: Mapping[str, object]) -> Iterator[Run]:
    """Open a candidate's run while the block runs.

    Args:
        store: Where the run is logged; None when tracking is off, and the run logs nothing.
        sweep: Identifier of the sweep that the candidate belongs to.
        kv: The candidate's display name.
        backend: Name of the engine's backend.
        config: The whole configuration, logged as parameters without its secrets.
    """
    if store is None:
        yield Untracked()
        return
    with store.candidate(sweep, kv, backend, config) as run:
        yield run


def open_store(tracking: Tracking, workdir: Path, model: str) -> "MlflowStore | None":
    """Open the tracking store of a model; None when tracking is off. Imports MLflow, which takes 2 s.

    Raises:
        UserError: when the store cannot be opened.
    """
    if not tracking.enabled:
        return None
    location = locate(tracking, workdir, model)
    from pipeline.registry.mlflow_store import MlflowStore

    return MlflowStore(location)
