"""The processes of a sweep's jobs: what kvgate sets of a launcher for them, what it says where one died, how it ends them."""

import atexit
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from subprocess import CalledProcessError
from typing import Any

import psutil
from omegaconf import OmegaConf

from pipeline.config.launchers import install
from pipeline.core.errors import MissingRequirement, UserError, short

SLURM = "submitit_slurm"
SLURM_COMMANDS = ("sbatch", "srun", "sacct")

SLURM_OVERRIDES = [
    # One folder for all, which submitit makes before it submits: Slurm fails a job whose output has no folder yet, and with
    # the plugin's own `.submitit/%j` it is made once sbatch has returned.
    "++hydra.launcher.submitit_folder=${hydra.sweep.dir}/.submitit",
]

RAY = "ray"
RAY_LINES = {
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",  # before lines that name their job, and that may be JSON
    "RAY_DEDUP_LOGS": "0",  # it takes lines that differ in numbers alone for one, errors as well
}
"""Variables by which Ray passes on the lines of jobs as they are."""
RAY_HERE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all its ports on 127.0.0.1, as on those systems, and not on every address
    "RAY_AUTH_MODE": "token",
}
"""Variables of a Ray that the command starts."""
RAY_STORE_BYTES = 75 << 20
"""Of the memory in which Ray keeps what tasks return; jobs return nothing. It takes no less."""
RAY_OVERRIDES = [
    "++hydra.launcher.ray.remote.max_retries=0",  # a job that used up the memory would be run again without end
    "++hydra.launcher.ray.remote.max_calls=1",  # a process a job, as submitit has it: what a job held is free for the next
]

LOST = {"TerminatedWorkerError", "BrokenProcessPool", "UncompletedJobError", "WorkerCrashedError", "OutOfMemoryError"}
"""Exceptions of joblib, submitit and ray for a process that ended before its job."""
ENDING_S = 5.0
LAST_LINES_S = 1.0


def start(name: str, keys: Mapping[str, object]) -> list[str]:
    """Start what a launcher's jobs run on where its plugin would start it otherwise: Ray. Return overrides for the plugin."""
    if name == SLURM:
        missing = [command for command in SLURM_COMMANDS if shutil.which(command) is None]
        if missing:
            raise MissingRequirement(
                f"hydra/launcher={SLURM}: no {' and no '.join(missing)} here; run it on a node of the cluster that submits jobs"
            )
        return SLURM_OVERRIDES
    if name != RAY:
        return []
    asked = OmegaConf.create()
    for key, value in keys.items():
        if value is not None:
            OmegaConf.update(asked, key, value)
    options = {str(key): value for key, value in (OmegaConf.select(asked, "ray.init") or {}).items()}
    variables = dict(RAY_LINES)
    if options.get("address", "local") == "local" and "RAY_ADDRESS" not in os.environ:
        variables |= RAY_HERE
        if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
            variables["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # else Ray leaves one in the home directory
        folder = tempfile.mkdtemp(prefix="kvgate-ray-")  # of its logs and sockets, which it would leave
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": RAY_STORE_BYTES, "_temp_dir": folder}
    for variable, value in variables.items():
        os.environ.setdefault(variable, value)
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        import ray

        ray.init(**options, logging_level=logging.WARNING)
    except SystemExit as error:  # what Ray makes of SIGTERM
        raise KeyboardInterrupt from error
    except Exception as error:  # it has no class of its own for that
        said = short(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", 200)
        raise MissingRequirement(
            f"hydra/launcher=ray: Ray did not start ({said}); run less beside it, or mend hydra.launcher.ray.init.* or the "
            f"installation ({install(RAY)})"
        ) from error
    signal.signal(signal.SIGTERM, terminated)  # Ray's would abort this process
    return RAY_OVERRIDES


def explained(name: str, error: Exception) -> Exception:
    """Return the refusal that a launcher's exception stands for: a worker died, no job was taken, or a key is wrong."""
    if isinstance(error, ValueError):
        said = short(" ".join(str(error).split()), 200)
        return UserError(f"hydra/launcher={name}: {said}; correct what it names in hydra.launcher.*")
    if isinstance(error.__cause__, CalledProcessError):  # as submitit raises it, with the class of a job that failed
        said = short(" ".join(str(error.__cause__.stderr or error).split()), 200)
        return MissingRequirement(f"hydra/launcher={name}: sbatch failed ({said}); mend what it names in hydra.launcher.*")
    if LOST.isdisjoint(kind.__name__ for kind in type(error).__mro__):
        return error
    lines = [line for line in str(error).splitlines() if line.strip()]
    # submitit's FailedJobError holds the traceback of what the process died of.
    detail = f" ({short(lines[-1], 200)})" if type(error).__name__ == "FailedJobError" and lines else ""
    going_on = "; jobs that Slurm has go on, and record how they end" if name == SLURM else ""
    return MissingRequirement(
        f"hydra/launcher={name}: the process of a job died{detail}: out of memory, or killed{going_on}; "
        "free some memory, or run fewer jobs at once"
    )


def end_workers(name: str) -> None:
    """End the jobs' processes of a launcher that would let them run on: submitit's on this machine, and Ray's."""
    finish(name)
    if name != "submitit_local":
        return
    workers = psutil.Process().children(recursive=True)
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(workers, timeout=ENDING_S)
    for worker in alive:
        with suppress(psutil.NoSuchProcess):
            worker.kill()


def finish(name: str) -> None:
    """End the Ray of the command, or leave its cluster, once the last lines of its jobs have been printed."""
    ray: Any = sys.modules.get(RAY)
    if name == RAY and ray is not None and ray.is_initialized():
        time.sleep(LAST_LINES_S)
        ray.shutdown()
