"""Digests of JSON, files, directories, and the source code."""

import ast
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from stages.core.threads import in_threads

ROOT = Path(__file__).resolve().parents[2]
"""Folder with the packages."""
FIRST_PARTY = ("plugins", "stages")
"""Packages whose code can change an artifact."""


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
def code_digest(*excluded: str) -> str:
    """Return the digest of the code of `plugins` and `stages`, except for the folders `excluded` of `stages`.

    Comments and docstrings do not count.
    """
    sources = [path for package in FIRST_PARTY for path in (ROOT / package).rglob("*.py")]
    trees = {path.relative_to(ROOT): path for path in sources if path.relative_to(ROOT).parts[1] not in excluded}
    return json_digest({name.as_posix(): _syntax_digest(path) for name, path in trees.items()})


@cache
def _syntax_digest(path: Path) -> str:
    """Return the digest of a source file's syntax tree without docstrings."""
    tree = ast.parse(path.read_bytes())
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            # A docstring, also of a field, is an expression statement that is only a constant.
            node.body = [
                part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
        # Expressions, which are most of the nodes, contain no statements.
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return json_digest(ast.dump(tree))
