"""Checks of command-line overrides and launchers. Composed configurations are searched for code that Hydra would run.

A sweep's launcher may be any installed Hydra plugin. A launcher's configuration can name code and shell commands (`_target_`,
`setup`). Therefore `_target_` is always the plugin's own, and other keys come from the command line, never from files of
--config-dir.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import OverrideParseException
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import CONF
from pipeline.config.config import STAGES
from pipeline.config.explain import suggest
from pipeline.config.override_syntax import as_typed, is_hydras, key_of, quoted, repeats_name, written
from stages.core.errors import MissingRequirement, UserError, short
from stages.core.redaction import leaves, redact_text
from stages.core.strict import Unreadable, read_file

MAX_BYTES = 1_000_000
MAX_JOBS = 1000
"""Maximum jobs of a sweep; every job is composed and checked before the first job runs."""

OPTION = re.compile(r"[\w-]+")
BRACKETED = re.compile(r"\[.*\]|\{.*\}", re.DOTALL)
SHARED = re.compile("workdir$|log$|dry$|tracking")
"""Keys whose values all jobs of a sweep share: the work directory, the output, the dry run, and the registry."""
SEARCHPATH = "hydra.searchpath"
LAUNCHER = "hydra/launcher"
LAUNCHER_KEYS = "hydra.launcher."
BASIC = "basic"
"""Hydra's launcher that runs the jobs sequentially in this process."""
EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit", "ray": "ray"}
"""Launcher -> kvgate's extra that installs it; the extra has the name of the library."""
LOGS = "sweep/.submitit"
"""Folder inside the work directory for the output of submitit's jobs."""
PROMPT_LOOKUP = "workloads.speculation"
"""The only key that may be an empty dict: it enables prompt lookup."""


def searching(folders: Sequence[str | Path]) -> list[str]:
    """Check the folders of --config-dir, and return the override that adds them to Hydra's search path."""
    # The options of gates and hydra have no files in conf/.
    groups = sorted({"gates", "hydra", *(path.parent.name for path in CONF.glob("*/*.yaml"))}) if folders else []
    for folder in map(Path, folders):
        # Options may include files of folders below their group. Other folders need not be kvgate's.
        paths = [*folder.glob("config.yaml"), *(path for group in groups for path in folder.glob(f"{group}/**/*.y*ml"))]
        if not paths:
            none = f"has no options, such as kv/NAME.yaml, in the folder of a group ({', '.join(groups)})"
            problem = none if folder.is_dir() else "no such directory"
            raise UserError(f"--config-dir={folder}: {problem}; give the one with your own kv/")
        for path in paths:
            _check_option(path, folder)
    places = dict.fromkeys(f"file://{Path(folder).resolve()}" for folder in folders)
    return [f"{SEARCHPATH}={written(list(places))}"] if folders else []


def readable(argument: str, parser: OverridesParser) -> str:
    """Return a command-line argument in Hydra's grammar; a value that the grammar cannot parse is quoted as one text.

    Paths may contain letters, `=`, `#`, brackets and quotes. The user must quote texts in lists and texts with commas, since
    commas may separate the values of a sweep. Raises UserError if the argument cannot be parsed, or if a dict in
    it has a name twice.
    """
    if _is_read(argument, parser):
        if repeats_name(argument):
            raise UserError(f"{short(redact_text(argument), 200)}: has a name twice; keep one of them")
        return argument
    key, equals, value = argument.partition("=")
    text = f"{key}={quoted(value)}"
    pasted = next((character for character in key if not (character.isascii() or character.isalpha())), None)
    if pasted:
        name = unicodedata.name(pasted, "a character outside ASCII")
        raise UserError(f"{short(redact_text(argument), 200)}: has {name} in its key; write the keyboard's character")
    if equals and "," not in value and not BRACKETED.fullmatch(value) and _is_read(text, parser):
        return text
    if argument in (*STAGES, "dry"):
        raise UserError(f"{argument}: has no value; write {'dry=true' if argument == 'dry' else f'stage={argument}'}")
    raise UserError(
        f"{short(redact_text(argument), 200) or 'an empty argument'}: cannot be read; write KEY=VALUE, and quote texts with "
        """commas or in lists and dicts, but no names, as in 'KEY="TEXT, TEXT"' and 'KEY={name: "TEXT"}'"""
    )


def refuse_contradictions(arguments: Sequence[str]) -> None:
    """Raise UserError if a command line gives a key two different values. Hydra would silently use the last value."""
    first: dict[str, str] = {}
    for argument in arguments:
        earlier = first.setdefault(key_of(argument), argument)
        if argument != earlier:
            raise UserError(
                f"{short(redact_text(argument), 200)}: contradicts {short(redact_text(earlier), 200)}; keep one of them"
            )


def _is_read(argument: str, parser: OverridesParser) -> bool:
    with suppress(OverrideParseException, ValueError):  # ValueError: a number of thousands of digits
        return bool(parser.parse_overrides([argument]))
    return False


def problem_of(override: Override, options_of: Callable[[str], Sequence[str]]) -> str | None:
    """Return the problem of an override: an unknown option, no effect, or a misleading meaning; None if there is no problem."""
    key, line = override.key_or_group, redact_text(as_typed(str(override.input_line)))
    if is_hydras(key):
        return _hydra_problem(override, line)
    options = options_of(key)
    for applies, problem in (
        (not key, "has no key; write KEY=VALUE"),
        (override.package is not None, f"a group has one place; write {key}=OPTION"),
        (options and (override.is_add() or override.is_force_add()), f"an option needs no +; write {key}=OPTION"),
        (override.is_delete(), "a key cannot be removed; write KEY=VALUE, as in gates.min_recovery=0.9"),
        (key == "backend.name", f"cannot be set by itself; write backend={line.partition('=')[2]}"),
        (override.value() == {} and key != PROMPT_LOOKUP, "an empty dict changes nothing; name the keys in it that you mean"),
        (options and isinstance(override.value(), dict), f"give an option, or the keys one by one, as {key}.NAME=VALUE"),
        (override.is_interval_sweep(), f"an interval has no values to try; give them, as in {key}=1,2"),
        (SHARED.match(key) and override.is_sweep_override(), "the jobs of a sweep share it; give one value"),
    ):
        if applies:
            return f"{line}: {problem}"
    if options and not isinstance(override.value(), Glob):
        swept = override.is_sweep_override()
        for item in islice(override.sweep_iterator(), MAX_JOBS + 1) if swept else [override.value()]:
            value = item.text if isinstance(item, QuotedString) else item
            if value not in options:
                shown = "null" if value is None else short(value, 200)
                return f"{key}={shown}: no such option{suggest(str(value), options)}"
    return None


def _hydra_problem(override: Override, line: str) -> str | None:
    key, value = override.key_or_group, override.value()
    plain = not override.is_sweep_override() and not override.is_delete() and override.package is None
    if key == LAUNCHER and plain:
        check_installed(value)
        return None
    if key.startswith(LAUNCHER_KEYS) and "_target_" not in line and plain:
        return None
    return f"{line}: kvgate sets hydra.* itself; leave it out (only the launcher of a sweep may be another one)"


def _check_option(path: Path, folder: Path) -> None:
    """Refuse a file of --config-dir that Hydra would ignore or put elsewhere, that is not YAML, or that uses aliases or `???`.

    Aliases can expand a small file to gigabytes. Hydra silently takes another file's value for `???`.
    """
    place = path.relative_to(folder)
    if path.suffix != ".yaml":
        raise UserError(f"--config-dir: {path}: is not read; name it {path.stem}.yaml")
    if (CONF / place).is_file():
        raise UserError(f"--config-dir: {path}: kvgate's own option of this name comes first; give it another name")
    try:
        text = read_file(path, MAX_BYTES).decode()
        for event in yaml.parse(text):
            if isinstance(event, yaml.AliasEvent):
                raise Unreadable("uses a YAML alias (*name); write the value out")
            if isinstance(event, yaml.ScalarEvent) and event.value == "???":
                raise Unreadable("??? is no value; write one, or leave the key out")
        loaded = OmegaConf.load(StringIO(text))
        if not (OmegaConf.is_dict(loaded) and loaded):
            raise Unreadable("has no keys; write KEY: VALUE")
        if len(place.parts) == 2:
            _check_place(place.parts[0], ConfigSource._get_header_dict(text)["package"], list(loaded))
    except Unreadable as error:
        raise UserError(f"--config-dir: {path}: {error}") from None
    # ValueError: not UTF-8; OverflowError: "\UFFFFFFFF"; OSError: OmegaConf's, for a file with a single number
    except (ValueError, OverflowError, OSError, RecursionError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"--config-dir: {path}: cannot be read ({' '.join(str(error).split())[:300]}); correct it") from None


def _check_place(group: str, package: str | None, keys: list[Any]) -> None:
    """Refuse an option whose keys Hydra would put outside its group, or an experiment's keys inside `experiment`."""
    if group == "experiment":
        if package != "_global_":
            raise Unreadable("an experiment needs the first line '# @package _global_'; write it")
    elif package not in (None, group, "_group_"):
        raise Unreadable(f"'# @package {package}' moves the keys out of {group}; leave that line out")
    elif group in keys:
        raise Unreadable(f"its keys belong to {group} already; leave out the line `{group}:`, and indent them less")


def installed() -> list[str]:
    """Return the names of the launchers that Hydra finds and whose library is installed."""
    Plugins.instance()  # loads the plugins, which store their configurations
    names = [name.removesuffix(".yaml") for name in ConfigStore.instance().list("hydra/launcher")]
    return sorted(name for name in names if name not in EXTRAS or find_spec(EXTRAS[name]) is not None)


def install(name: str) -> str:
    return f"pip install -e '.[{EXTRAS[name]}]' in kvgate's directory"


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
    """Refuse keys below `hydra` in files of --config-dir. Hydra would import and call the values, or a launcher run them.

    `shipped` is the same node composed without these files. Interpolations are not resolved.
    """
    composed, expected = (dict(leaves(OmegaConf.to_container(node))) for node in (hydra, shipped))
    for key in {**expected, **composed}:
        if not NOT_CODE.match(key) and composed.get(key) != expected.get(key):
            fix = "give it on the command line, or leave it out" if key.startswith("launcher.") else "leave it out"
            raise UserError(f"hydra.{key}: is set by a file, and could name code; {fix}")
