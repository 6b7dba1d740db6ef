"""The launchers that may run a sweep's jobs, their keys, and what may not stand there.

The configuration of a launcher can name code and shell commands (`_target_`, `setup`), and Slurm's becomes lines of a script.
So each launcher has a list of keys that may be set, with what their values look like; all else stays as its plugin has it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from pipeline.core.errors import MissingRequirement, UserError, short
from pipeline.core.redaction import leaves

BASIC = "basic"
"""One job after the other, in this process."""
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"

NO_NUMBER = (
    "a job ends with a verdict, not with a number to minimize; search formats with stage=tune, or list the candidates, "
    "as in -m kv=fp8,int8"
)
"""Why there is no other sweeper, and what to use."""


Kind = tuple[Callable[[object], bool], str]
"""What a key's values look like: whether one fits, and what to give instead."""


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _is_word(value: object) -> bool:
    # Without what a shell or a line of a script takes apart. Slurm's constraints have brackets and bars.
    return isinstance(value, str) and re.fullmatch(r"[\w.,:=@%+/&|*()\[\]-]{1,200}", value, re.ASCII) is not None


COUNT: Kind = (_is_count, "give a whole number above zero")
JOBS: Kind = (lambda value: _is_count(value) or value == -1, "give how many jobs run at once, or -1 for one a core")
SHARE: Kind = (lambda value: type(value) in (int, float) and 0 < float(str(value)) < 1e6, "give a number above zero")
WORD: Kind = (_is_word, "give a name of letters, digits and .,:=@%+/&|*()[]-")


@dataclass(frozen=True)
class Launcher:
    target: str
    extra: str = ""
    """The extra of kvgate that installs it, and its library's name; empty for what comes with Hydra."""
    keys: Mapping[str, Kind] | None = None
    """Below `hydra.launcher.`: what may be set."""
    output: str | None = None
    """Where below the work directory its jobs write what they print; None: to this terminal."""

    @property
    def packages(self) -> tuple[str, ...]:
        plugin = ".".join(self.target.split(".")[:2])
        return (plugin, self.extra) if self.extra else (plugin,)

    @property
    def install(self) -> str:
        return f"pip install 'kvgate[{self.extra}]'"


_QUEUE = {"timeout_min": COUNT, "cpus_per_task": COUNT, "gpus_per_node": COUNT, "mem_gb": COUNT, "name": WORD}
_LOGS = "sweep/.submitit"

LAUNCHERS: Mapping[str, Launcher] = {
    BASIC: Launcher("hydra._internal.core_plugins.basic_launcher.BasicLauncher"),
    "joblib": Launcher("hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher", "joblib", {"n_jobs": JOBS}),
    "submitit_local": Launcher(
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher", "submitit", _QUEUE, _LOGS
    ),
    "submitit_slurm": Launcher(
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
        "submitit",
        {
            **_QUEUE,
            **dict.fromkeys(("partition", "qos", "account", "constraint", "exclude", "gres"), WORD),
            **dict.fromkeys(("mem_per_gpu", "mem_per_cpu"), WORD),
            **dict.fromkeys(("cpus_per_gpu", "gpus_per_task", "array_parallelism", "signal_delay_s", "max_num_timeout"), COUNT),
        },
        _LOGS,
    ),
    "ray": Launcher(
        "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher",
        "ray",
        {
            "ray.init.address": WORD,
            "ray.init.num_cpus": COUNT,
            "ray.init.num_gpus": COUNT,
            "ray.remote.num_cpus": SHARE,
            "ray.remote.num_gpus": SHARE,
        },
    ),
}


def check_installed(name: str) -> None:
    """Raise MissingRequirement where a launcher's plugin is not installed, UserError for a name that is none of ours."""
    launcher = LAUNCHERS.get(name)
    if launcher is None:
        raise UserError(f"hydra/launcher={short(name)}: no such launcher; choose one of {', '.join(LAUNCHERS)}")
    try:
        found = all(find_spec(package) is not None for package in launcher.packages)
    except ModuleNotFoundError:  # no plugin at all
        found = False
    if not found:
        raise MissingRequirement(f"hydra/launcher={name}: not installed; {launcher.install}")


def problem(name: str, key: str, value: object) -> str | None:
    """Return what is wrong with a value of a launcher's key, None where nothing is."""
    keys = LAUNCHERS[name].keys or {}
    if key not in keys:
        fix = f"choose one of {', '.join(keys)}" if keys else f"add hydra/launcher={'|'.join(list(LAUNCHERS)[1:])}"
        return f"hydra.launcher.{key}: may not be set of hydra/launcher={name}; {fix}"
    fits, fix = keys[key]
    return None if fits(value) else f"hydra.launcher.{key}={short(value)}: {fix}"


def check_sweep(hydra: DictConfig) -> tuple[str, Mapping[str, object]]:
    """Refuse a composition whose launcher or sweeper is not one of ours, or differs from its plugin beyond the keys above.

    Return the launcher's name, and its keys with their values, dotted, interpolations unresolved.
    """
    for key in ("launcher", "sweeper"):
        if not isinstance(hydra[key], DictConfig):
            raise UserError(f"hydra.{key}={short(hydra[key])}: is no {key} of Hydra; leave it out")
    sweeper = str(hydra.sweeper.get("_target_"))
    if sweeper != BASIC_SWEEPER:
        raise UserError(f"hydra.sweeper._target_={sweeper}: {NO_NUMBER}")
    target = str(hydra.launcher.get("_target_"))
    name = next((name for name, launcher in LAUNCHERS.items() if launcher.target == target), None)
    if name is None:
        raise UserError(f"hydra.launcher._target_={target}: is no launcher; choose hydra/launcher={'|'.join(LAUNCHERS)}")
    check_installed(name)
    own = dict(leaves(OmegaConf.to_container(ConfigStore.instance().load(f"hydra/launcher/{name}.yaml").node)))
    composed = dict(leaves(OmegaConf.to_container(hydra.launcher)))
    for key in {**own, **composed}:
        changed = key not in own or key not in composed or composed[key] != own[key]
        wrong = problem(name, key, composed.get(key)) if changed else None
        if wrong is not None:
            raise UserError(wrong)
    return name, composed
