"""Checks of a sweep's launcher: any installed Hydra plugin, changed only by keys on the command line.

A launcher's configuration can name code and shell commands (`_target_`, `setup`). Therefore `_target_` is always the plugin's
own, and other keys come from the command line, never from files of --config-dir.
"""

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from stages.core.errors import MissingRequirement, UserError, short
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
    nodes = {option: ConfigStore.instance().load(f"hydra/launcher/{option}.yaml").node for option in installed()}
    plugins = {option: dict(leaves(OmegaConf.to_container(node))) for option, node in nodes.items()}
    name = next((option for option, keys in plugins.items() if keys["_target_"] == target), None)
    if name is None:
        raise UserError(f"hydra.launcher._target_={target}: is no launcher; choose hydra/launcher={'|'.join(plugins)}")
    launcher: Any = OmegaConf.to_container(hydra.launcher)
    shipped, composed = plugins[name], dict(leaves(launcher))
    for key in {**shipped, **composed}:
        changed = key not in shipped or key not in composed or composed[key] != shipped[key]
        if changed and key.rpartition(".")[2] == "_target_":
            raise UserError(f"hydra.launcher.{key}: names code; leave it out")
        if changed and not any(f"{key}.".startswith(f"{option}.") or option.startswith(f"{key}.") for option in typed):
            raise UserError(f"hydra.launcher.{key}: is set by a file, and could name a command; give it on the command line")
    return name, launcher
