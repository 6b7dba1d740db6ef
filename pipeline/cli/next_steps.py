"""The suggested next command, which a command prints at its end.

The command is complete and ready to paste. For stages that work on checkpoints, it repeats the user's arguments with some
changes. For stages that work on earlier results, it has all settings that differ from the defaults: repeating an `experiment=`
would start another sweep.
"""

import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.markup import escape

from pipeline.cli import console
from pipeline.config.compose import plan
from pipeline.config.config import Config
from pipeline.config.override_syntax import differing, key_of, written
from pipeline.config.stages import StageFacts
from stages.core.strict import StrictModel
from stages.engines.config import BackendConfig, InterpreterConfig


def command_line(base: Sequence[str], *changes: str, sweep: bool = False) -> str:
    """Return the command with the arguments `base`, without `log=`. `changes` replace arguments with the same keys.

    A change of a group also removes the keys of this group from `base`: `kv=fp8` removes `kv.window`. Only a sweep keeps its
    launcher. The command begins with `python`, or with the path of this Python if a shell would not find it.
    """
    running, on_path = Path(sys.executable), shutil.which("python")
    same = on_path is not None and Path(on_path).absolute().parent == running.parent
    changed = {"log", *map(key_of, changes)}
    launcher = () if sweep else ("hydra/launcher", "hydra.launcher")
    keys = [(part, key_of(part)) for part in base]
    remaining = [part for part, key in keys if not {key, key.partition(".")[0]} & changed and not key.startswith(launcher)]
    arguments = shlex.join([*(["-m"] if sweep else []), *remaining, *changes])
    return f"{'python' if same else shlex.quote(str(running))} -m pipeline {arguments}".rstrip()


def standing(config: Config, stage: str, *changes: str) -> str:
    """Return the command of a stage that works on earlier results."""
    return command_line(carried(config), f"stage={stage}", *changes)


def promotion_command(config: Config, *changes: str) -> str:
    """Return the command of a promotion, which decides by the same gates.

    The command names the backend's Python, because serving needs it and the evidence does not record it.
    """
    python = config.backend.python if isinstance(config.backend, InterpreterConfig) else None
    python_keys = [] if python is None else [f"backend={config.backend.name}", f"backend.python={written(python)}"]
    return command_line(carried(config, "gates"), "stage=promote", *python_keys, *changes)


def carried(config: Config, *groups: str) -> list[str]:
    """Return the settings of model, workdir, tracking, signing and `groups` that differ from the defaults."""
    values, standard = config.model_dump(mode="json"), _defaults()
    names = ("model", "workdir", "tracking", "signing", *groups)
    return [part for name in names for part in differing(name, values[name], standard[name])]


@cache
def _defaults() -> dict[str, Any]:
    """Return the default values of all keys."""
    return plan([], multirun=False).jobs[0].model_dump(mode="json")


class NextStep(StrictModel):
    """A suggestion for the next step."""

    why: str
    command: str | None = None
    """Shell command; null if the step is not a command."""
    wrong: list[str] = Field(default=[])
    """Some wrong answers of the baseline, which the step follows from."""


def show(step: NextStep | None) -> None:
    """Print a suggestion, if there is one."""
    if step is None:
        return
    lines = [
        "",
        *(f"  {escape(line)}" for line in step.wrong),
        f"[bold]Next[/]: {escape(step.why)}{':' if step.command is not None else ''}",
    ]
    if step.command is not None:
        lines.append(f"  {escape(step.command)}")
    console.result("next", *lines, paste=True, **step.model_dump())


def after_stage(facts: StageFacts, base: Sequence[str], *, sweep: bool = False) -> NextStep | None:
    """Return the next step after a stage that ended well; None if no stage follows."""
    if facts.following is None:
        return None
    stage, why = facts.following
    return NextStep(why=why, command=command_line(base, f"stage={stage}", sweep=sweep))


SERVING = {
    "engine_args.yaml": "{1}vllm serve {0}/checkpoint --config {0}/engine_args.yaml",
    "llm_args.yaml": "{1}trtllm-serve {0}/checkpoint --config {0}/llm_args.yaml",
    "engine/config.json": "{1}trtllm-serve {0}/engine --tokenizer {0} --backend tensorrt",
    "launch.txt": "(cd {0} && {1}sh launch.txt)",
}
"""File of a bundle -> the shell command that serves the bundle."""


def serving(engine: Path, backend: BackendConfig | None = None) -> str:
    """Return the command that serves an engine, or the Python call that loads it.

    `backend` is the configuration that judged it, if known: its Python's folder goes first on PATH.
    """
    command = next((command for file, command in SERVING.items() if (engine / file).is_file()), None)
    python = backend.python if isinstance(backend, InterpreterConfig) else None
    folder = Path(python).expanduser().absolute().parent if python is not None and "/" in python else None
    path = f'env PATH={shlex.quote(str(folder))}:"$PATH" ' if folder is not None else ""
    return f"pipeline.api.load({str(engine)!r})" if command is None else command.format(shlex.quote(str(engine)), path)


def after_promotion(config: Config, engine: Path) -> NextStep:
    trusted = differing("signing.trusted", list(config.signing.trusted), [])
    bundle = f"bundle={written(str(engine))}"
    return NextStep(why="verify the engine that serves", command=command_line(trusted, "stage=verify", bundle))


def after_tuning(config: Config, chosen: str, folder: Path | None, base: Sequence[str]) -> NextStep:
    """Return the step that judges the chosen policy, from the configuration folder `folder` or, if None, from conf/."""
    arguments = [part for part in base or carried(config) if not part.lstrip("+~").startswith("tune.")]
    if folder is not None and f"--config-dir={folder}" not in arguments:
        arguments = [f"--config-dir={folder}", *arguments]
    return NextStep(why=f"judge {chosen}", command=command_line(arguments, "stage=evaluate", f"kv={chosen}"))
