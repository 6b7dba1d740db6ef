"""What is found only in the middle of a run: the tracking store, libraries for the end of it, GPUs, memory, the disk."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from pipeline.artifacts.workdir import all_memory, free_bytes, lacks
from pipeline.checkpoint.places import locate_checkpoint
from pipeline.config.config import JUDGING, Config
from pipeline.core.errors import MissingRequirement
from pipeline.loading import open_loader
from pipeline.registry.reaching import check_reachable, copy_store
from pipeline.registry.tracking import locate
from pipeline.run.inputs import ON_THIS_MACHINE, cache_bytes, inspect_model, weight_bytes
from pipeline.terminal.dry import Row, size, total


def checks_ahead(config: Config) -> list[Callable[[], object]]:
    """Return the checks of what only the middle of a run would find; the stages that move aliases rehearse it instead."""
    found: list[Callable[[], object]] = []
    if config.stage in JUDGING:
        found.append(open_loader(config.backend).check_runs)
        found.append(partial(_check_memory, config))
        if config.tracking.enabled:
            found.append(partial(check_store, config))
    return found


def check_store(config: Config) -> None:
    """Open the tracking store, of SQLite a copy of it. Nothing in it changes.

    Raises:
        UserError, MissingRequirement: as a candidate's run would.
    """
    location = locate(config.tracking, config.work, config.model.label)
    from pipeline.registry.mlflow_store import MlflowStore, check_experiment

    if location.served:
        check_experiment(location)
    elif location.file is None:
        check_reachable(location)
    else:
        with TemporaryDirectory() as scratch:
            copy = copy_store(location, Path(scratch))
            if copy is not None:
                MlflowStore(copy)


def least_memory(config: Config) -> tuple[int, int]:
    """Return the bytes of the weights and of the load's cache: the least that an evaluation holds at once."""
    checkpoint = inspect_model(locate_checkpoint(config.model.path))
    cache = cache_bytes(config, checkpoint) if config.backend.name in ON_THIS_MACHINE else 0
    return weight_bytes(checkpoint) if cache else 0, cache


def _check_memory(config: Config) -> None:
    weights, cache = least_memory(config)
    memory = all_memory()
    if weights + cache > memory:
        raise MissingRequirement(
            lacks("the weights and the cache of workloads.load take", weights + cache, "this machine has", memory, "of memory")
            + "; lower workloads.load.batch or workloads.load.context_tokens"
        )


def check_disk(config: Config, rows: Sequence[Row]) -> None:
    """Refuse what the disk of the work directory does not hold in all, as far as earlier artifacts tell.

    Raises:
        MissingRequirement: with the number of bytes that are missing.
    """
    needed, free = round(total(rows, "written").least), free_bytes(config.work)
    if needed > free:
        problem = lacks("the artifacts of this command take", needed, "its disk has", free, "free")
        raise MissingRequirement(f"workdir={config.workdir}: {problem}; free some, or give another workdir")


def check_peak(rows: Sequence[Row]) -> None:
    """Refuse what takes more memory at once than this machine has, as far as earlier artifacts tell.

    Raises:
        MissingRequirement: with the number of bytes that are missing.
    """
    needed, memory = round(total(rows, "peak").least), all_memory()
    if needed > memory:
        raise MissingRequirement(lacks("making these artifacts takes", needed, "this machine has", memory, "of memory"))


def notes(config: Config) -> list[str]:
    """Return what else there is to know before a job that judges: how engines run here, and the least memory they take."""
    if config.stage not in JUDGING:
        return []
    threads, processors = getattr(config.backend, "threads", None), os.cpu_count() or 1
    parts = ", ".join(f"{name}={value}" for name, value in open_loader(config.backend).run_parts().items())
    lines = [f"engines of backend={config.backend.name} run here with {parts}"] if parts else []
    if threads is not None and threads > processors:
        lines.append(f"backend.threads={threads}: this machine has {processors} processors, for which its threads wait")
    weights, cache = least_memory(config)
    if cache:
        lines.append(
            f"an evaluation holds at least {size(weights + cache)} of memory (weights {size(weights)}, the cache of "
            f"workloads.load {size(cache)}; activations and libraries come on top)"
        )
        if weights + cache > psutil.virtual_memory().available:
            lines.append("memory: that is more than is available now")
    return lines
