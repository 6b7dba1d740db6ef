"""Runs the jobs of a sweep with a Hydra launcher: starts Ray, translates errors of launchers, and ends their processes."""

import atexit
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from pickle import PicklingError
from subprocess import CalledProcessError
from typing import Any, TypeVar

import psutil
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from pipeline.cli.progress import show_progress
from pipeline.config.compose import Plan, initialized
from pipeline.config.override_syntax import is_hydras
from pipeline.config.overrides import install
from stages.core.errors import MissingRequirement, Refusal, UserError, short

T = TypeVar("T")
RAY = "ray"
RAY_LINES = {
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",  # the lines already name their job, and may be JSON
    "RAY_DEDUP_LOGS": "0",  # it would merge lines that differ only in numbers, even errors
}
"""Environment variables that make Ray print the jobs' lines unchanged."""
RAY_HERE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all ports on 127.0.0.1, as on Windows and macOS, not on every address
    "RAY_AUTH_MODE": "token",
}
"""Environment variables of a Ray instance that the command starts."""
RAY_STORE_BYTES = 75 << 20
"""Bytes of Ray's object store, which holds the results of tasks. Ray's minimum suffices: a job returns only a `JobEnd`."""
RAY_OVERRIDES = (
    "++hydra.launcher.ray.remote.max_retries=0",  # otherwise a job that ran out of memory is retried forever
    "++hydra.launcher.ray.remote.max_calls=1",  # one process per job, which frees all its memory
)

KVGATE_ERRORS: tuple[type[Exception], ...] = (Refusal, TypeError, AttributeError, PicklingError)
"""Exceptions that are not the launcher's: refusals, and pickle's errors for a job that cannot be sent (defects of kvgate)."""
KILL_AFTER_S = 5.0
OUTPUT_WAIT_S = 1.0


def launch(planned: Plan, run_job: Callable[[DictConfig], T]) -> list[T]:
    """Run the jobs of a sweep with its launcher and return the results of `run_job`, in the order of the command line.

    Hydra sends `run_job` to the job's machine and composes the configuration there again, because some defaults depend on the
    machine.
    """
    earlier = psutil.Process().children(recursive=True)
    try:
        with initialized():
            state = GlobalHydra.instance()
            assert state.hydra is not None
            more = RAY_OVERRIDES if planned.launcher == RAY else ()
            composed = state.hydra.compose_config(
                "config", [*planned.launcher_overrides, *more], RunMode.MULTIRUN, from_shell=False
            )
            context = HydraContext(state.config_loader(), Callbacks())
            jobs = [[override for override in job if not is_hydras(override.lstrip("+~"))] for job in planned.job_overrides]
            if planned.launcher == RAY:
                with show_progress("starting ray"):
                    start_ray(OmegaConf.to_container(composed.hydra.launcher))
            with _stdout_inherited(), launcher_errors(planned.launcher):
                returned = Plugins.instance().instantiate_launcher(context, run_job, composed).launch(jobs, initial_job_idx=0)
        return [job.return_value for job in returned]  # raises the job's exception
    except BaseException:
        end_workers(earlier)
        raise
    finally:
        _end_ray()


@contextmanager
def _stdout_inherited() -> Iterator[None]:
    """Let the processes that start in the block inherit stdout as descriptor 1, as before `reserve_stdout`."""
    try:
        results = sys.stdout.fileno()
    except UnsupportedOperation:  # stdout is not a file, such as in a notebook
        results = 1
    stdout_copy = os.dup(1)
    os.dup2(results, 1)
    try:
        yield
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def start_ray(launcher: Any) -> None:
    """Start Ray with kvgate's settings, before its plugin would. Raises MissingRequirement if Ray does not start."""
    options = {key: value for key, value in ((launcher.get("ray") or {}).get("init") or {}).items() if value is not None}
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
        detail = short(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", 200)
        raise MissingRequirement(
            f"hydra/launcher=ray: Ray did not start ({detail}); run fewer other programs, or fix "
            f"hydra.launcher.ray.init.* or the installation ({install(RAY)})"
        ) from error
    signal.signal(signal.SIGTERM, terminated)  # Ray's handler would abort this process


@contextmanager
def launcher_errors(name: str) -> Iterator[None]:
    """Turn a launcher's error into UserError for a wrong key, else MissingRequirement; KVGATE_ERRORS stay unchanged."""
    try:
        yield
    except KVGATE_ERRORS:
        raise
    except Exception as error:
        command = error.__cause__ if isinstance(error.__cause__, CalledProcessError) else None  # such as sbatch
        text = " ".join(command.stderr.split()) if command is not None and command.stderr else str(error)
        lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
        if isinstance(error, ValueError):
            raise UserError(f"hydra/launcher={name}: {short(lines[0], 200)}; correct hydra.launcher.*") from error
        raise MissingRequirement(
            f"hydra/launcher={name}: the process of a job died, or the launcher failed ({short(lines[-1], 200)}); free some "
            "memory, run fewer jobs at once, or correct hydra.launcher.*"
        ) from error


def end_workers(earlier: Collection[psutil.Process]) -> None:
    """Stop the processes of jobs that would outlive the command. `earlier` are processes that existed before."""
    _end_ray()
    workers = []
    for worker in set(psutil.Process().children(recursive=True)).difference(earlier):
        with suppress(psutil.NoSuchProcess):
            # a resource tracker ignores signals, ends by itself after the command, and removes leftovers of killed workers
            if not any("resource_tracker" in argument for argument in worker.cmdline()):
                worker.send_signal(signal.SIGINT)
                workers.append(worker)
    _, alive = psutil.wait_procs(workers, timeout=KILL_AFTER_S)
    for worker in alive:
        with suppress(psutil.NoSuchProcess):
            worker.kill()


def _end_ray() -> None:
    """Stop the command's Ray instance, or leave the Ray cluster, after a wait for the jobs' last lines."""
    ray: Any = sys.modules.get(RAY)
    if ray is not None and ray.is_initialized():
        time.sleep(OUTPUT_WAIT_S)
        ray.shutdown()
