"""What a shell offers after `kvgate <Tab>`: groups and their options, keys, values of enumerations, files.

It reads conf/ and the typed configuration alone: Hydra's own completion knows no enumerations, and takes twice as long.
"""

import os
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pipeline.config import CONF
from pipeline.config.config import Config
from pipeline.core.errors import UserError
from pipeline.core.strict import PathText
from pipeline.formats.table import CODES

OPTIONS: dict[str, tuple[str, ...]] = {
    "--help": (),
    "--hydra-help": (),
    "--version": (),
    "--cfg": ("job", "hydra", "all"),
    "--resolve": (),
    "--package": (),
    "--multirun": (),
    "-m": (),
    "--config-dir": (),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--shell-completion": (),
}
"""Options, with the values of those that take one of some."""

BASH = r"""_kvgate_replies()
{
    local line=${COMP_LINE:0:COMP_POINT} current=$1; shift
    local word=${line##* }
    # bash ends words at = and :, and wants replies without what stands before
    local before=${word%"$current"} reply
    COMPREPLY=()
    while IFS= read -r reply; do COMPREPLY+=("${reply#"$before"}"); done < <(COMP_LINE=$line "$@" -sc query=bash 2>/dev/null)
}
_kvgate() { _kvgate_replies "$2" "$1"; }
complete -o nospace -o default -F _kvgate kvgate
"""
PYTHON = r"""_kvgate_python()
{
    COMPREPLY=()
    [[ $COMP_LINE =~ ^[^\ ]+\ +-m\ +pipeline\  ]] && _kvgate_replies "$2" "$1" -m pipeline.kvgate
}
complete -o nospace -o default -F _kvgate_python python python3
"""
ZSH = r"""(( $+functions[compdef] )) || { autoload -U compinit && compinit }
_kvgate()
{
    local -a replies=(${(f)"$(COMP_LINE=$LBUFFER kvgate -sc query=zsh 2>/dev/null)"})
    compadd -Q -S '' -- $replies
}
compdef _kvgate kvgate
"""
FISH = "complete -c kvgate -f -a '(COMP_LINE=(commandline -cp) kvgate -sc query=fish)'\n"
INSTALL = {"bash": BASH + PYTHON, "zsh": ZSH, "fish": FISH}
UNINSTALL = {
    "bash": "complete -r kvgate python python3\n",
    "zsh": "compdef -d kvgate\n",
    "fish": "complete -c kvgate -e\n",
}


def complete(arguments: Sequence[str]) -> int:
    """Do what `-sc install=bash`, `-sc uninstall=bash` and, for the shell, `-sc query=bash` ask for; returns the exit code.

    Raises:
        UserError: for anything else.
    """
    action, _, shell = (arguments[0] if len(arguments) == 1 else "").partition("=")
    if shell not in INSTALL or action not in ("install", "uninstall", "query"):
        raise UserError(f"--shell-completion {' '.join(arguments)}: give install=bash, zsh or fish, or uninstall= of one")
    if action == "query":
        print("\n".join(candidates(os.environ.get("COMP_LINE", ""))))
    else:
        print((INSTALL if action == "install" else UNINSTALL)[shell], end="")
    return 0


def candidates(line: str) -> list[str]:
    """Return what may stand in place of the last word of a command line, each as a whole word."""
    words = line.split()
    word = words.pop() if words and not line.endswith(" ") else ""
    before = words[-1] if words else ""
    if before == "--config-dir":
        return list(_files("", word, directories=True))
    if OPTIONS.get(before):
        found: Iterable[str] = OPTIONS[before]
    elif word.startswith("-"):
        found = OPTIONS
    elif "=" in word:
        found = _values(word, _folders(words))
    else:
        found = _keys(word, words, _folders(words))
    return sorted(one for one in found if one.startswith(word))


def _folders(words: Sequence[str]) -> list[Path]:
    """Return conf/, and the directory of --config-dir where the line has one."""
    given = [words[i + 1] for i in range(len(words) - 1) if words[i] == "--config-dir"]
    given += [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
    return [CONF, *(Path(folder).expanduser() for folder in given)]


def _group_options(group: str, folders: Sequence[Path]) -> list[str]:
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")}) if group.isidentifier() else []


def _values(word: str, folders: Sequence[Path]) -> Iterator[str]:
    """Yield values after `KEY=`; of a sweep's list `KEY=a,b` other values of the last one."""
    key, _, value = word.partition("=")
    listed, comma, last = value.rpartition(",")
    options = [*_group_options(key.lstrip("+"), folders), *_choices(_annotations(key.lstrip("+"), ()))]
    options += CODES if key.endswith(".dtype") and key.startswith("kv.") else ()
    for option in options:
        if option not in listed.split(","):
            yield f"{key}={listed}{comma}{option}"
    if not options and any(_is_path(annotation) for annotation in _annotations(key.lstrip("+"), ())):
        yield from _files(f"{key}=", last)


def _keys(word: str, words: Sequence[str], folders: Sequence[Path]) -> Iterator[str]:
    """Yield groups and keys below what the word has so far: `kv=`, `kv.`, `kv.sink_tokens=`."""
    prefix, word = (word[0], word[1:]) if word.startswith("+") else ("", word)
    parent, dot, _ = word.rpartition(".")
    if not parent:
        for group in sorted(path.name for path in CONF.iterdir() if path.is_dir()):
            if _group_options(group, folders):
                yield f"{prefix}{group}="
    backend = next((one.partition("=")[2] for one in reversed(words) if one.startswith("backend=")), "onnxruntime")
    for model in records(_annotations(parent, (backend,))) if parent else [Config]:
        for name, field in model.model_fields.items():
            below = bool(records([field.annotation]))
            if not below and not parent and _group_options(name, folders):
                continue
            yield f"{prefix}{parent}{dot}{name}{'.' if below else '='}"


def _annotations(key: str, backends: Sequence[str]) -> list[Any]:
    """Return the types of a key, of all kinds of records that may stand above it; of `backend` those of the named backends."""
    found: list[Any] = [Config]
    for part in key.split(".") if key else ():
        fields = [model.model_fields[part] for model in records(found, backends) if part in model.model_fields]
        found = [Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation for field in fields]
    return [one for annotation in found for one in (records([annotation], backends) or [annotation])]


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield the alternatives of a type: of `X | None` X and None."""
    if get_origin(annotation) is Annotated:
        yield from _parts(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from _parts(one)
    else:
        yield annotation


def records(annotations: Sequence[Any], backends: Sequence[str] = ()) -> list[Any]:
    """Return the records among the alternatives of types; where some are of the given backends, those alone."""
    models = [part for annotation in annotations for part in _parts(annotation) if hasattr(part, "model_fields")]
    named = [model for model in models if "name" in model.model_fields and _named(model) & set(backends)]
    return named or models


def _named(model: Any) -> set[object]:
    return set(get_args(model.model_fields["name"].annotation))


def _choices(annotations: Sequence[Any]) -> list[str]:
    choices: dict[str, None] = {}
    for part in (part for annotation in annotations for part in _parts(annotation)):
        if get_origin(part) is Literal:
            choices |= dict.fromkeys(map(str, get_args(part)))
        elif part is bool:
            choices |= {"true": None, "false": None}
        elif part is type(None) and choices:
            choices["null"] = None
    return list(choices)


def _is_path(annotation: Any) -> bool:
    validators = [*get_args(PathText)[1:]]
    return any(one in validators for one in _metadata(annotation))


def _metadata(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
        yield from _metadata(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from _metadata(one)


def _files(prefix: str, path: str, directories: bool = False) -> Iterator[str]:
    """Yield the paths that begin with what is written so far; directories end with a slash."""
    folder, slash, name = path.rpartition("/")
    try:
        entries = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(name) and (entry.is_dir() or not directories) and (name or not entry.name.startswith(".")):
            yield f"{prefix}{folder}{slash}{entry.name}{'/' if entry.is_dir() else ''}"
