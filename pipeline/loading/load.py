"""The way from the pipeline into `stages/`: the only place that looks modules up by name.

Modules are imported when a stage needs them: they import torch and other heavy libraries, and a configuration error must
be reported without waiting for those.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType
from typing import Any, cast

from pipeline.artifacts.backend import Backend, Loader
from pipeline.artifacts.digest import FIRST_PARTY
from pipeline.artifacts.server import Server
from pipeline.core.backends import BackendConfig
from pipeline.core.errors import MissingRequirement
from pipeline.loading.protocols import (
    Calibration,
    Conversion,
    DecodingAgain,
    Evaluation,
    Exporting,
    Quantization,
    Reports,
    Tuning,
)


def conversion() -> Conversion:
    """Load the module that converts GGUF files."""
    return cast(Conversion, _load("stages.gguf.convert"))


def calibration() -> Calibration:
    """Load the module that writes calibration texts."""
    return cast(Calibration, _load("stages.quantize.calibration"))


def quantization() -> Quantization:
    """Load the quantize stage."""
    return cast(Quantization, _load("stages.quantize.run"))


def exporting() -> Exporting:
    """Load the module that writes ModelOpt's exports."""
    return cast(Exporting, _load("stages.quantize.export"))


def tuning() -> Tuning:
    """Load the tune stage."""
    return cast(Tuning, _load("stages.tune.run"))


def evaluation() -> Evaluation:
    """Load the evaluate stage."""
    return cast(Evaluation, _load("stages.evaluate"))


def again() -> DecodingAgain:
    """Load `stages.evaluate.again`, which is no part of the key of an evaluation."""
    return cast(DecodingAgain, _load("stages.evaluate.again"))


def reports() -> Reports:
    """Load `stages.report`."""
    return cast(Reports, _load("stages.report"))


def open_loader(config: BackendConfig) -> Loader:
    """Return the backend that a configuration names, from the `backend.py` of its folder in `stages/engines`."""
    loader: Loader = _load(f"stages.engines.{config.folder}.backend").open_backend(config)
    return loader


def open_backend(config: BackendConfig) -> Backend:
    """Return a backend that builds its engines."""
    backend = open_loader(config)
    assert isinstance(backend, Backend), f"backend={config.name} builds nothing"
    return backend


def open_server(config: BackendConfig) -> Server:
    """Return a backend that is given servers."""
    server = open_loader(config)
    assert isinstance(server, Server), f"backend={config.name} builds its engines"
    return server


def _load(module: str) -> Any:
    return import_module(module)


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
