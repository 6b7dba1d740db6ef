"""Complete command lines of kvgate, ready to paste.

For stages that work on checkpoints, the command repeats the user's arguments with some changes. For stages that work on earlier
results, it has all settings that differ from the defaults: repeating an `experiment=` would start another sweep.
"""

import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipeline.config import CONF
from pipeline.config.config import Config
from pipeline.config.override_syntax import differing, key_of
from stages.verdict.thresholds import Thresholds

_given: list[tuple[str, ...]] = []
"""Arguments of this process's command; empty if kvgate is called from Python."""


def remember(arguments: Sequence[str]) -> None:
    """Store the arguments of this process's command."""
    _given[:] = [tuple(arguments)]


def typed() -> list[str]:
    """Return the user's arguments for repetition in a next command, without `log=`; empty outside a command."""
    return [argument for given in _given for argument in given if not argument.startswith("log=")]


def whole(*, sweep: bool = False) -> str | None:
    """Return this process's complete command; None outside a command."""
    return command_line(typed(), (), sweep=sweep) if _given else None


def begun() -> str:
    """Return the beginning of a command line: `python`, or the path of this Python if a shell would not find it."""
    own, found = Path(sys.executable), shutil.which("python")
    same = found is not None and Path(found).absolute().parent == own.parent
    return f"{'python' if same else shlex.quote(str(own))} -m pipeline"


def command_line(base: Sequence[str], arguments: Sequence[str], *, sweep: bool = False) -> str:
    """Return the command with `arguments` added to `base`, replacing arguments with the same keys.

    An argument for a group also removes the keys of this group from `base`: `kv=fp8` removes `kv.window`.
    """
    changed = {key_of(argument) for argument in arguments}
    kept = [one for one in base if not {key_of(one), key_of(one).partition(".")[0]} & changed]
    return f"{begun()} {shlex.join([*(['-m'] if sweep else []), *kept, *arguments])}".rstrip()


def judging(base: Sequence[str], *changes: str, sweep: bool = False) -> str:
    """Return the command of a stage that works on a checkpoint: `base` with changes. Only a sweep has a launcher."""
    if not sweep:
        base = [part for part in base if not part.lstrip("+~").startswith(("hydra/launcher", "hydra.launcher"))]
    return command_line(base, changes, sweep=sweep)


def standing(config: Config, stage: str, *changes: str, groups: Sequence[str] = ()) -> str:
    """Return the command of a stage that works on earlier results."""
    return command_line(carried(config, *groups), [f"stage={stage}", *changes])


def promoting(config: Config, *changes: str) -> str:
    """Return the command that promotes the candidates of a command, with the same gates."""
    return standing(config, "promote", *changes, groups=("gates",))


def carried(config: Config, *groups: str) -> list[str]:
    """Return the settings of model, workdir, tracking, signing and `groups` that differ from the defaults."""
    values, standard = config.model_dump(mode="json"), _defaults()
    names = ("model", "workdir", "tracking", "signing", *groups)
    return [part for name in names for part in differing(name, values[name], standard[name])]


@cache
def _defaults() -> dict[str, Any]:
    """Return the default values of the keys that next commands repeat. Composing all keys would take 0.1 s."""

    def load(name: str) -> dict[str, Any]:
        values = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"), resolve=False)
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}

    groups = {"model": load("model/tiny"), "tracking": load("tracking/mlflow"), "gates": Thresholds().model_dump(mode="json")}
    return load("config") | groups
