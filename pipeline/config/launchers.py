"""Checks of a sweep's launcher: any installed Hydra plugin, changed only by keys on the command line.

A launcher's configuration can name code and shell commands (`_target_`, `setup`). Therefore `_target_` is always the plugin's
own, and other keys come from the command line, never from files of --config-dir.
"""

import re
from importlib.util import find_spec

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from stages.core.errors import MissingRequirement, UserError, short
from stages.core.redaction import leaves

LAUNCHER_KEYS = "hydra.launcher."
BASIC = "basic"
"""Hydra's launcher that runs the jobs sequentially in this process."""
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


NOT_CODE = re.compile(r"(runtime|overrides|searchpath|mode|job\.(name|override_dirname)|sweeper\.params)\b")
"""Keys below `hydra` that differ between compositions without harm."""


def refuse_code(hydra: DictConfig, shipped: DictConfig) -> None:
    """Refuse what files of --config-dir set below `hydra`: Hydra would import and call it, or a launcher would run it.

    `shipped` is the same node composed without these files. Interpolations are not resolved.
    """
    composed, expected = (dict(leaves(OmegaConf.to_container(node))) for node in (hydra, shipped))
    for key in {**expected, **composed}:
        if not NOT_CODE.match(key) and composed.get(key) != expected.get(key):
            fix = "give it on the command line, or leave it out" if key.startswith("launcher.") else "leave it out"
            raise UserError(f"hydra.{key}: is set by a file, and could name code; {fix}")
