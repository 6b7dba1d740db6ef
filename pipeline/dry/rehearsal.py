"""The stages that move aliases, rehearsed: on a copy of a SQLite store they do what they would do, and the copy is dropped."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.markup import escape

from pipeline.config.config import Config
from pipeline.core.errors import UserError
from pipeline.dry.ahead import check_store
from pipeline.evidence.identity import read_identity
from pipeline.registry import promotion, summary
from pipeline.registry.reaching import SQLITE, copy_store, named
from pipeline.registry.tracking import locate
from pipeline.run.job import Run
from pipeline.run.planning import recommend_policy, show_capacity
from pipeline.run.serving import check_finished, listed_candidates, monitor, move_champion, route, verify
from pipeline.terminal import console
from pipeline.upkeep.stages import prune, show_status

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore


def rehearse(config: Config, sweeping: bool) -> None:
    """Do what a stage that makes no artifacts would do, and say what it comes to.

    Raises:
        UserError, GateRefusal, MissingRequirement: as the stage would.
    """
    if config.stage == "capacity":
        show_capacity(config, sweeping)
    elif config.stage == "recommend":
        recommend_policy(config, sweeping)
    elif config.stage == "status":
        show_status(config, read_identity, as_json=False)
    elif config.stage == "prune":
        shown = config.prune.model_copy(update={"apply": False})
        prune(config.model_copy(update={"prune": shown}), read_identity)
    elif config.stage == "verify":  # it writes nothing as it is
        verify(_run(config))
    else:
        _move(config)


def _say(line: str) -> None:
    console.say(escape(line))


def _run(config: Config) -> Run:
    return Run(config, label=config.kv.name)


def _move(config: Config) -> None:
    last = summary.load(config.work, config.promote.sweep)
    listed = []
    if config.stage == "promote":
        check_finished(config, last)
        listed = listed_candidates(config, last)
    if not config.tracking.enabled:
        _run(config).registry()  # says that there is none
    with _copied(config) as run:
        if run is None:
            location = locate(config.tracking, config.work, config.model.label)
            _say(f"{named(location)} is shared with others: what stage={config.stage} would move is not looked at")
        elif config.stage == "promote":
            _, move = move_champion(run, run.registry(), listed, last.sweep)
            _say(f"{move.message}{'' if move.changed else '; nothing would move'}")
        elif config.stage == "rollback":
            _say(promotion.rollback(run.log(run.registry())).message)
        else:
            {"route": route, "monitor": monitor}[config.stage](run)


@dataclass
class _Rehearsal(Run):
    """A job whose registry is a copy."""

    copy: "MlflowStore | None" = field(default=None)

    def registry(self) -> "MlflowStore":
        assert self.copy is not None, "a rehearsal has a copy"
        return self.copy


@contextmanager
def _copied(config: Config) -> Iterator[_Rehearsal | None]:
    """Yield the job over a copy of its registry while the block runs; None where the registry is no file.

    Raises:
        UserError, MissingRequirement: for a registry that cannot be used, or is not there.
    """
    location = locate(config.tracking, config.work, config.model.label)
    if not location.uri.startswith(SQLITE):
        check_store(config)
        yield None
        return
    from pipeline.registry.mlflow_store import MlflowStore

    with TemporaryDirectory() as scratch:
        copy = copy_store(location, Path(scratch))
        if copy is None:
            raise UserError(f"stage={config.stage}: {named(location)} is not there yet; run stage=evaluate first")
        yield _Rehearsal(config, label=config.kv.name, copy=MlflowStore(copy))
