"""Puts a small evaluation in the place of the real one, in every process that has this folder on its PYTHONPATH.

A launcher's workers are interpreters of their own, so that a test cannot patch them. The seed of a job says how it ends.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

RUNNER = "pipeline.run.runner"

PASSES, DEFECT, BAD_INPUT, FAILS, MISSING, UNDECIDED, KILLED, WAITS, WAITS_ONCE = 0, 1, 2, 3, 4, 6, 9, 15, 16
"""Seeds. From DEFECT to MISSING they are the exit codes of a command with that job alone. WAITS_ONCE passes when requeued."""
WAIT_S = 120.0
"""Seconds that a job with the seed WAITS takes: no test waits for its end."""
SLOW_START = "SMALL_SWEEPS_START_S"
"""Environment variable: seconds that the runner's libraries take to load, as on a busy file system."""


def evaluate(run: Any) -> None:
    """Judge and record a candidate that passes or does not; or end otherwise, as the seed says."""
    from judged_candidates import judged_candidate
    from small_runs import build, judge

    from pipeline.core.errors import MissingRequirement, UserError
    from pipeline.registry import summary
    from pipeline.terminal import console

    seed, work = run.config.seed, run.config.work
    with console.progress(f"small {run.label}") as progress:
        progress("began", 0, 0)
    if seed == DEFECT:
        raise RuntimeError("planted")
    if seed == BAD_INPUT:
        raise UserError("seed=2: is bad input that shows late; give another")
    if seed == MISSING:
        raise MissingRequirement("seed=4: is missing here")
    if seed == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == WAITS or (seed == WAITS_ONCE and "SLURM_RESTART_COUNT" not in os.environ):
        (work / f"waits-{os.getpid()}").touch()
        time.sleep(WAIT_S)
    verdicts: dict[int, Literal["PASS", "FAIL", "INCONCLUSIVE"]] = {FAILS: "FAIL", UNDECIDED: "INCONCLUSIVE"}
    verdict = verdicts.get(seed, "PASS")
    if run.config.tracking.enabled:
        with _measured(work / "small" / f"{run.label}.json"):
            checkpoint = work.parent / "model.safetensors"
            build(work, checkpoint, "fp16")  # what all jobs share
            judge(work, checkpoint, run.label, run.sweep, os.environ.get("MLFLOW_TRACKING_URI"), verdict)
        return
    time.sleep(0.3 * (seed == PASSES))  # the first of a sweep ends after the second, where they run at once
    candidate = judged_candidate(work / "judged" / str(seed), run.label, verdict, metrics={"memory/kib_per_token": 1.0})
    summary.record(work, run.sweep, candidate)


@contextmanager
def _measured(path: Path) -> Iterator[None]:
    """Write how long the block took, and how long it waited for each lock."""
    from pipeline.artifacts import locks

    waited: dict[str, float] = {}
    plain: Any = vars(locks)["FileLock"]

    def acquire(lock: Any, **options: Any) -> Any:
        started = time.monotonic()
        held = plain.acquire(lock, **options)
        file = Path(lock.lock_file)
        name = file.name if file.name.endswith((".json.lock", ".db.lock")) else f"{file.parent.name}/"
        waited[name] = waited.get(name, 0.0) + time.monotonic() - started
        return held

    vars(locks)["FileLock"] = type("Measured", (plain,), {"acquire": acquire})
    started = time.monotonic()
    try:
        yield
    finally:
        vars(locks)["FileLock"] = plain
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"seconds": time.monotonic() - started, "waited": waited}))


class _Patching(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        time.sleep(float(os.environ.get(SLOW_START, "0")))
        self._loader.exec_module(module)
        stages: dict[str, Callable[[Any], None]] = vars(module)["STAGES"]
        stages["evaluate"] = evaluate


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == RUNNER else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Patching(spec.loader)
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Finder())
