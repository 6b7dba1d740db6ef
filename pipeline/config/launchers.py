"""Launchers of a sweep: any installed Hydra plugin, changed only by keys on the command line; their errors, and their end.

A launcher's configuration can name code and shell commands (`_target_`, `setup`). Therefore `_target_` is always the plugin's
own, and other keys come from the command line, never from files of --config-dir.
"""

import atexit
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pickle import PicklingError
from subprocess import CalledProcessError
from typing import Any

import psutil
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from stages.core.errors import REFUSALS, MissingRequirement, UserError, short
from stages.core.redaction import leaves

LAUNCHER_KEYS = "hydra.launcher."
BASIC = "basic"
"""Hydra's launcher that runs the jobs sequentially in this process."""
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
NO_NUMBER = (
    "a job ends with a verdict, not with a number to minimize; search formats with stage=tune, or list the candidates, "
    "as in -m kv=fp8,int8"
)
"""Reason why other sweepers are refused, and the alternative."""
EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit", "ray": "ray"}
"""Launcher -> kvgate's extra that installs it; the extra has the name of the library."""
LOGS = "sweep/.submitit"
"""Folder inside the work directory for the output of submitit's jobs."""


def installed() -> list[str]:
    """Return the names of the launchers that Hydra finds."""
    Plugins.instance()  # loads the plugins, which store their configurations
    names = [name.removesuffix(".yaml") for name in ConfigStore.instance().list("hydra/launcher")]
    return sorted(name for name in names if name not in EXTRAS or find_spec(EXTRAS[name]) is not None)


def install(name: str) -> str:
    return f"pip install 'kvgate[{EXTRAS[name]}]'"


def check_installed(name: object) -> None:
    """Raise MissingRequirement if a launcher's plugin is not installed, UserError if the name is unknown."""
    if name in installed():
        return
    if isinstance(name, str) and name in EXTRAS:
        raise MissingRequirement(f"hydra/launcher={name}: not installed; {install(name)}")
    raise UserError(f"hydra/launcher={short(str(name))}: no such launcher; choose one of {', '.join(installed())}")


def check_sweep(hydra: DictConfig, typed: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Refuse a composition with another sweeper, or with a launcher other than an installed plugin plus the typed keys.

    `typed` are the dotted keys below `hydra.launcher` on the command line. Return the launcher's name and its configuration.
    Interpolations are not resolved.
    """
    for key in ("launcher", "sweeper"):
        if not isinstance(hydra[key], DictConfig):
            raise UserError(f"hydra.{key}={short(hydra[key])}: is no {key} of Hydra; leave it out")
    sweeper = str(hydra.sweeper.get("_target_"))
    if sweeper != BASIC_SWEEPER:
        raise UserError(f"hydra.sweeper._target_={sweeper}: {NO_NUMBER}")
    target = str(hydra.launcher.get("_target_"))
    nodes = {one: ConfigStore.instance().load(f"hydra/launcher/{one}.yaml").node for one in installed()}
    plugins = {one: dict(leaves(OmegaConf.to_container(node))) for one, node in nodes.items()}
    name = next((one for one, keys in plugins.items() if keys["_target_"] == target), None)
    if name is None:
        raise UserError(f"hydra.launcher._target_={target}: is no launcher; choose hydra/launcher={'|'.join(plugins)}")
    launcher: Any = OmegaConf.to_container(hydra.launcher)
    own, composed = plugins[name], dict(leaves(launcher))
    for key in {**own, **composed}:
        changed = key not in own or key not in composed or composed[key] != own[key]
        if changed and key.rpartition(".")[2] == "_target_":
            raise UserError(f"hydra.launcher.{key}: names code; leave it out")
        if changed and not any(f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.") for one in typed):
            raise UserError(f"hydra.launcher.{key}: is set by a file, and could name a command; give it on the command line")
    return name, launcher


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

NOT_OF_THE_LAUNCHER: tuple[type[Exception], ...] = (*REFUSALS, TypeError, AttributeError, PicklingError)
"""Refusals, and the errors of pickle for a job that it cannot send, which are defects of kvgate."""
ENDING_S = 5.0
LAST_LINES_S = 1.0


def start(name: str, launcher: Mapping[str, Any]) -> list[str]:
    """Start Ray, before its plugin would, and return overrides for the plugin. Other launchers need no preparation."""
    if name != RAY:
        return []
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
        said = short(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", 200)
        raise MissingRequirement(
            f"hydra/launcher=ray: Ray did not start ({said}); run fewer other programs, or mend "
            f"hydra.launcher.ray.init.* or the installation ({install(RAY)})"
        ) from error
    signal.signal(signal.SIGTERM, terminated)  # Ray's handler would abort this process
    return RAY_OVERRIDES


@contextmanager
def launching(name: str) -> Iterator[None]:
    """Turn an exception of a launcher into a refusal: a wrong key or a dead process."""
    try:
        yield
    except NOT_OF_THE_LAUNCHER:
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


def end_workers() -> None:
    """Stop the processes of jobs that would outlive the command."""
    finish()
    workers = []
    for worker in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # a resource tracker ignores signals, ends by itself after the command, and removes what killed workers left
            if not any("resource_tracker" in argument for argument in worker.cmdline()):
                worker.send_signal(signal.SIGINT)
                workers.append(worker)
    _, alive = psutil.wait_procs(workers, timeout=ENDING_S)
    for worker in alive:
        with suppress(psutil.NoSuchProcess):
            worker.kill()


def finish() -> None:
    """Stop the command's Ray instance, or leave the Ray cluster, after the jobs' last lines have been printed."""
    ray: Any = sys.modules.get(RAY)
    if ray is not None and ray.is_initialized():
        time.sleep(LAST_LINES_S)
        ray.shutdown()
