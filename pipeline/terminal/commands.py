"""Command lines of kvgate, whole, so that they can be pasted.

Stages that work on checkpoints repeat what was typed, with what changes. Stages that work on what others left are given what
differs from the defaults, wherever it came from (an `experiment=` would sweep again).
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
from pipeline.core.backends import InProcessConfig
from pipeline.core.overrides import differing
from pipeline.verdict.gates import Gates

_given: list[tuple[str, ...]] = []
"""The arguments of the command that this process is; empty in a program."""


def begun() -> str:
    """Return how a command line begins: with `python`, or with this one's path where a shell finds another one, or none."""
    own, found = Path(sys.executable), shutil.which("python")
    same = found is not None and Path(found).absolute().parent == own.parent
    return f"{'python' if same else shlex.quote(str(own))} -m pipeline"


def command_line(base: Sequence[str], arguments: Sequence[str], *, sweep: bool = False) -> str:
    """Return the command with these arguments in place of those of the same keys.

    Another option of a group than that of `base` takes the keys of that group away too.
    """
    changed = {_key(argument) for argument in arguments}
    kept = [one for one in base if not {_key(one), _key(one).partition(".")[0]} & changed]
    return f"{begun()} {shlex.join([*(['-m'] if sweep else []), *kept, *arguments])}".rstrip()


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def remember(arguments: Sequence[str]) -> None:
    """Take the arguments of the command that this process is."""
    _given[:] = [tuple(arguments)]


def typed() -> list[str]:
    """Return what a next command repeats of what was typed: not in which form this one spoke; nothing outside of a command."""
    return [argument for given in _given for argument in given if not argument.startswith("log=")]


def whole(*, sweep: bool = False) -> str | None:
    """Return this process's command; None outside of a command."""
    return command_line(typed(), (), sweep=sweep) if _given else None


def carried(config: Config, *groups: str) -> list[str]:
    """Return the arguments by which a stage that works on what others left finds it: what differs from the defaults."""
    values, standard = config.model_dump(mode="json"), defaults()
    arguments: list[str] = []
    for group in ("model", "workdir", "tracking", "signing", *groups):
        arguments += differing(group, values[group], standard[group])
    return arguments


@cache
def defaults() -> dict[str, Any]:
    """Return what a command without arguments has, of the keys that next commands repeat: to compose all takes 0.1 s."""
    groups = {"model": _load("model/tiny"), "tracking": _load("tracking/mlflow"), "gates": Gates().model_dump(mode="json")}
    return _load("config") | groups


def _load(name: str) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"), resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def judging(base: Sequence[str], *changes: str, sweep: bool = False) -> str:
    """Return the command of a stage that works on a checkpoint: what was typed, with changes."""
    if not sweep:  # only a sweep has a launcher
        base = [part for part in base if not part.lstrip("+~").startswith(("hydra/launcher", "hydra.launcher"))]
    return command_line(base, changes, sweep=sweep)


def standing(config: Config, stage: str, *changes: str, groups: Sequence[str] = ()) -> str:
    """Return the command of a stage that works on what others left."""
    return command_line(carried(config, *groups), [f"stage={stage}", *changes])


def promoting(config: Config, *changes: str) -> str:
    """Return the command that promotes what a command judged: by its gates, and with its backend."""
    backend = config.backend
    opened: list[str] = []
    if isinstance(backend, InProcessConfig):
        chosen = {"backend": backend.name} not in defaults()["defaults"]
        opened = [f"backend={backend.name}"] * chosen + [f"backend.threads={backend.threads}"]
    return standing(config, "promote", *opened, *changes, groups=("gates",))
