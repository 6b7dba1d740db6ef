"""Opens backends by the name of their folder, and reports a library that is not installed in one line.

Modules of `stages/` import torch and other heavy libraries. The pipeline imports these modules inside the functions that need
them, so that a configuration error is reported without waiting for the imports.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from stages.core.digest import FIRST_PARTY
from stages.core.errors import MissingRequirement
from stages.engines.backend import Backend
from stages.engines.config import BackendConfig


def open_backend(config: BackendConfig) -> Backend[BackendConfig]:
    """Return the backend that a configuration names, from the `backend.py` of its folder in `stages/engines`."""
    backend: Backend[BackendConfig] = import_module(f"stages.engines.{config.folder}.backend").open_backend(config)
    return backend


@contextmanager
def required_libraries() -> Iterator[None]:
    """Turn the error for a library that is not installed into MissingRequirement.

    A missing first-party module stays a defect.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if library in FIRST_PARTY:
            raise
        raise MissingRequirement(f"{library} is not installed here: pip install {library}") from error
