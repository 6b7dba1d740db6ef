"""Digests: of JSON, of files, of directories, and of the source code a stage can reach."""

import ast
import hashlib
import importlib.util
import json
import os
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FIRST_PARTY = ("pipeline", "stages", "plugins")


def json_digest(value: object) -> str:
    """sha256 of the canonical JSON of `value`; NaN is refused because it has no canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tree_files(root: Path) -> dict[str, str]:
    """Relative POSIX path -> sha256 of every regular file under `root`; hidden files are left out."""
    paths = (p for p in sorted(root.rglob("*")) if p.is_file())
    relative = ((p, p.relative_to(root)) for p in paths)
    return {r.as_posix(): file_digest(p) for p, r in relative if not any(part.startswith(".") for part in r.parts)}


def tree_entries(root: Path, but: str) -> dict[str, str]:
    """Relative POSIX path -> kind of everything below `root` but directories and the file `but`; hidden or not.

    What `tree_files` leaves out is here. Links are not followed, except that `root` itself may be one.
    """
    found: dict[str, str] = {}
    todo = [""]
    while todo:
        under = todo.pop()
        for name in (f"{under}{inner}" for inner in os.listdir(root / under)):
            kind = kind_of(root / name)
            if kind == "directory":
                todo.append(f"{name}/")
            elif (name, kind) != (but, "file"):
                found[name] = kind
    return found


def kind_of(path: Path) -> str:
    """What `path` itself is, wherever a link may lead: `file`, `directory`, `link` or `special file`."""
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(path.lstat().st_mode), "special file")


def files_digest(files: Mapping[str, str], under: str = "") -> str:
    """Digest of a path -> sha256 table, or of the part of it below the folder `under` (which is cut off)."""
    prefix = f"{under.strip('/')}/" if under else ""
    return json_digest({path[len(prefix) :]: digest for path, digest in files.items() if path.startswith(prefix)})


def _source(module: str) -> Path | None:
    """Source file of one of our modules, None when there is no such module (then the name is of something inside one).

    By path: looking a submodule up with importlib would import its parents, and with them torch and ModelOpt.
    """
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], *rest)
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _first_party_imports(path: Path, module: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports are not followed by the code digest"
            names.add(str(node.module))
            # `from stages import onnx` names a module, `from stages.engines.onnx import build` perhaps one.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in FIRST_PARTY}


def reachable_modules(entry: str) -> dict[str, Path]:
    """Every module of ours that `entry` can import, directly or not, found by reading import statements."""
    found: dict[str, Path] = {}
    todo = [entry]
    while todo:
        name = todo.pop()
        source = _source(name)
        if name in found or source is None:
            continue
        found[name] = source
        parents = {name.rsplit(".", 1)[0]} if "." in name else set()
        todo += sorted(_first_party_imports(source, name) | parents)
    return found


@cache
def code_digest(entry: str) -> str:
    """Digest of the source of `entry` and of all it can import from this project."""
    return json_digest({name: file_digest(path) for name, path in reachable_modules(entry).items()})
