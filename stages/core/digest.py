"""Digests of JSON, files, directories, and the source code that a stage can reach."""

import errno
import hashlib
import importlib.util
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType

from stages.core.threads import in_threads

FIRST_PARTY = ("pipeline", "stages", "plugins")
IMPORT = re.compile(
    rf"^[ \t]*(?:from|import)[ \t]+((?:{'|'.join(FIRST_PARTY)})\b[\w.]*)(?:[ \t]+import[ \t]+(\([^)]*\)|.*))?", re.MULTILINE
)
"""Matches a first-party import: the module, and the imported names."""


def json_digest(value: object) -> str:
    """Return the sha256 of the canonical JSON of `value`. Raises ValueError for NaN, which has no canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file. Raises OSError for special files: reading a pipe would block."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_digests(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return name -> sha256 of files in a directory, hashed in parallel."""
    names = list(names)
    return dict(zip(names, in_threads(file_digest, [directory / name for name in names]), strict=True))


def tree_files(root: Path) -> dict[str, str]:
    """Return relative POSIX path -> sha256 of every regular file under `root`, without hidden files and folders."""
    paths = (path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file())
    return file_digests(root, [path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)])


def tree_entries(root: Path, excluded: str) -> dict[str, str]:
    """Return relative POSIX path -> kind of everything below `root` except the file `excluded`.

    Unlike `tree_files` it lists hidden files, links, special files and empty directories. Other directories appear only in the
    paths of their entries. Links are not followed, except that `root` may be a link.
    """
    entries: dict[str, str] = {}
    os.listdir(root)  # raises for a directory that cannot be read, whose entries rglob leaves out
    for path in root.rglob("*"):
        name, kind = path.relative_to(root).as_posix(), kind_of(path)
        if (name, kind) != (excluded, "file") and not (kind == "directory" and os.listdir(path)):
            entries[name] = kind
    return entries


def kind_of(path: Path) -> str:
    """Return the kind of `path` itself: `file`, `directory`, `link` (to any target) or `special file`."""
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(path.lstat().st_mode), "special file")


def files_digest(files: Mapping[str, str], under: str = "") -> str:
    """Return the digest of a path -> sha256 table, or of its part below the folder `under`, with that prefix removed."""
    prefix = f"{under.strip('/')}/" if under else ""
    return json_digest({path[len(prefix) :]: digest for path, digest in files.items() if path.startswith(prefix)})


@cache
def _source(module: str) -> Path | None:
    """Return the source file of a first-party module, or None if `module` names something inside a module.

    The file is looked up by path: importlib would import the parents of a submodule, and so torch and ModelOpt.
    """
    package, *folders = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], *folders)
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@cache
def _first_party_imports(path: Path) -> set[str]:
    """Return the first-party names that a source imports, and some names that are not modules.

    A regular expression finds the imports, because parsing hundreds of files would take a second.
    """
    names: set[str] = set()
    for module, imported in IMPORT.findall(path.read_text(encoding="utf-8")):
        # `from stages import onnx` names a module; in `from stages.engines.onnx import build`, `build` may not be a module.
        names |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", imported))}
    return names


def reachable_modules(entry: str) -> dict[str, Path]:
    """Return every first-party module that `entry` can import, directly or not, by reading import statements.

    Includes the scripts that a library's own interpreter runs for these modules.
    """
    modules: dict[str, Path] = {}
    todo = [entry]
    while todo:
        name = todo.pop()
        source = _source(name) if name not in modules else None
        if source is None:
            continue
        modules[name] = source
        parents = {name.rsplit(".", 1)[0]} if "." in name else set()
        # Nothing imports the scripts that another interpreter runs: they lie in a package `worker`.
        scripts = {f"{name}.{path.stem}" for path in source.parent.glob("kvgate_*.py")} if name.endswith(".worker") else set()
        todo += sorted(_first_party_imports(source) | parents | scripts)
    return modules


@cache
def code_digest(entry: str) -> str:
    """Return the digest of the code of `entry` and of every module that it can import, without comments and docstrings."""
    modules = reachable_modules(entry)
    assert modules, f"{entry} is not a module of kvgate"
    return json_digest({name: compiled_digest(path) for name, path in modules.items()})


@cache
def compiled_digest(path: Path) -> str:
    """Return the digest of a source file's bytecode, which Python compiles ten times as fast as `ast` builds a syntax tree."""
    return json_digest(_instructions(compile(path.read_bytes(), path.name, "exec", dont_inherit=True, optimize=2)))


def _instructions(code: CodeType) -> list[object]:
    """Return the parts of compiled code that decide its behaviour, equal in every process of one Python version."""
    constants = [
        _instructions(value)
        if isinstance(value, CodeType)
        else sorted(map(repr, value))
        if isinstance(value, frozenset)
        else repr(value)
        for value in code.co_consts
    ]
    arguments = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
    names = [code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
    return [code.co_code.hex(), code.co_exceptiontable.hex(), constants, arguments, names]
