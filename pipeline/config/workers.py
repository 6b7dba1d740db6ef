"""The processes of a sweep's jobs: settings of their launcher, errors if a process dies, and shutdown."""

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
from stages.core.errors import MissingRequirement, UserError, short

SLURM = "submitit_slurm"
SLURM_COMMANDS = ("sbatch", "srun", "sacct")

SLURM_OVERRIDES = [
    # One folder for all jobs, which submitit creates before sbatch runs. Slurm fails a job if its output folder does not exist
    # yet, and the plugin's default `.submitit/%j` is created only after sbatch has returned.
    "++hydra.launcher.submitit_folder=${hydra.sweep.dir}/.submitit",
]

RAY = "ray"
RAY_LINES = {
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",  # the lines already name their job, and may be JSON
    "RAY_DEDUP_LOGS": "0",  # it would merge lines that differ only in numbers, even errors
}
"""Environment variables that make Ray print the jobs' lines unchanged."""
RAY_HERE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all ports on 127.0.0.1, as on those systems, not on every address
    "RAY_AUTH_MODE": "token",
}
"""Environment variables of a Ray instance that the command starts."""
RAY_STORE_BYTES = 75 << 20
"""Bytes of Ray's object store, which holds the results of tasks: Ray's minimum, since jobs return nothing."""
RAY_OVERRIDES = [
    "++hydra.launcher.ray.remote.max_retries=0",  # otherwise a job that ran out of memory is retried forever
    "++hydra.launcher.ray.remote.max_calls=1",  # one process per job, which frees all its memory
]

LOST = {"TerminatedWorkerError", "BrokenProcessPool", "UncompletedJobError", "WorkerCrashedError", "OutOfMemoryError"}
"""Names of the exceptions of joblib, submitit and ray for a process that died during its job."""
ENDING_S = 5.0
LAST_LINES_S = 1.0


def start(name: str, keys: Mapping[str, object]) -> list[str]:
    """Prepare the launcher, and return overrides for its plugin. Ray is started here, before the plugin would start it."""
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
            variables["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # else Ray writes a token file into the home directory
        folder = tempfile.mkdtemp(prefix="kvgate-ray-")  # logs and sockets, which Ray would not remove
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": RAY_STORE_BYTES, "_temp_dir": folder}
    for variable, value in variables.items():
        os.environ.setdefault(variable, value)
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        import ray

        ray.init(**options, logging_level=logging.WARNING)
    except SystemExit as error:  # Ray's reaction to SIGTERM
        raise KeyboardInterrupt from error
    except Exception as error:  # Ray has no specific class for a failed start
        said = short(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", 200)
        raise MissingRequirement(
            f"hydra/launcher=ray: Ray did not start ({said}); run fewer other programs, or mend "
            f"hydra.launcher.ray.init.* or the installation ({install(RAY)})"
        ) from error
    signal.signal(signal.SIGTERM, terminated)  # Ray's handler would abort this process
    return RAY_OVERRIDES


def explained(name: str, error: Exception) -> Exception:
    """Return the UserError or MissingRequirement for a launcher's exception: a dead worker, a refused job or a wrong key."""
    if isinstance(error, ValueError):
        said = short(" ".join(str(error).split()), 200)
        return UserError(f"hydra/launcher={name}: {said}; correct hydra.launcher.*")
    if isinstance(error.__cause__, CalledProcessError):  # submitit raises it with the class of a failed job
        said = short(" ".join(str(error.__cause__.stderr or error).split()), 200)
        return MissingRequirement(f"hydra/launcher={name}: sbatch failed ({said}); mend hydra.launcher.*")
    if LOST.isdisjoint(kind.__name__ for kind in type(error).__mro__):
        return error
    lines = [line for line in str(error).splitlines() if line.strip()]
    # submitit's FailedJobError holds the traceback that ended the process.
    detail = f" ({short(lines[-1], 200)})" if type(error).__name__ == "FailedJobError" and lines else ""
    going_on = "; jobs that Slurm has continue, and record how they end" if name == SLURM else ""
    return MissingRequirement(
        f"hydra/launcher={name}: the process of a job died{detail}: out of memory, or killed{going_on}; "
        "free some memory, or run fewer jobs at once"
    )


def end_workers(name: str) -> None:
    """Stop the job processes that would outlive the command: submitit's on this machine, and Ray's."""
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
    """Stop the command's Ray instance, or leave the Ray cluster, after the jobs' last lines have been printed."""
    ray: Any = sys.modules.get(RAY)
    if name == RAY and ray is not None and ray.is_initialized():
        time.sleep(LAST_LINES_S)
        ray.shutdown()
