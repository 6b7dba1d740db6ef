"""Backends by the name of their folder, and a library that is not installed as one line.

Modules of `stages/` import torch and other heavy libraries: the pipeline imports them inside the functions that need them, so
that a configuration error is reported without waiting for those.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType

from pipeline.artifacts.backend import Backend, Loader
from pipeline.artifacts.digest import FIRST_PARTY
from pipeline.core.backends import BackendConfig
from pipeline.core.errors import MissingRequirement


def open_loader(config: BackendConfig) -> Loader:
    """Return the backend that a configuration names, from the `backend.py` of its folder in `stages/engines`."""
    loader: Loader = import_module(f"stages.engines.{config.folder}.backend").open_backend(config)
    return loader


def open_backend(config: BackendConfig) -> Backend:
    """Return a backend that builds its engines."""
    backend = open_loader(config)
    assert isinstance(backend, Backend), f"backend={config.name} builds nothing"
    return backend


@contextmanager
def required_libraries() -> Iterator[None]:
    """Turn a library that is not installed into MissingRequirement.

    Only an import of ours that fails counts: a missing module of ours, or one that a library looks for while it works, stays
    a defect.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        importer = _importer(error.__traceback__)
        if library in FIRST_PARTY or importer is None:
            raise
        raise MissingRequirement(f"{importer} needs {library}, which is not installed here: pip install {library}") from error


def _importer(traceback: TracebackType | None) -> str | None:
    """Return the module of ours whose import statement failed; None when the failure came from somewhere else.

    Below our statement there may be only the import system and the top levels of the modules that it loads.
    """
    importer: str | None = None
    while traceback is not None:
        frame = traceback.tb_frame
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in FIRST_PARTY:
            importer = module
        elif not module.startswith("importlib") and frame.f_code.co_name != "<module>":
            importer = None
        traceback = traceback.tb_next
    return importer
