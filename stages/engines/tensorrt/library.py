"""Imports TensorRT or TensorRT for RTX, which have the same Python API. No other module of `stages/engines` imports them."""

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Literal

from stages.core.errors import MissingRequirement
from stages.engines.bundle import release_of

Name = Literal["tensorrt_rtx", "tensorrt"]

RANGES: dict[Name, tuple[tuple[int, int], tuple[int, int]]] = {
    "tensorrt": ((10, 14), (12, 0)),
    "tensorrt_rtx": ((1, 7), (1, 8)),
}
"""The first supported release, which has all calls that kvgate uses, and the first later release whose bindings were not
checked. tests/contract/test_tensorrt_facts.py reads the bindings of TensorRT 10.14 to 11.4 and TensorRT for RTX 1.7."""

TITLES: dict[Name, str] = {"tensorrt_rtx": "TensorRT for RTX", "tensorrt": "TensorRT"}

HOW_TO_GET: dict[Name, str] = {
    "tensorrt_rtx": "pip install 'tensorrt-rtx-cu13>=1.7,<1.8'",
    "tensorrt": (
        "pip install 'tensorrt-cu13>=10.14,<12' --extra-index-url https://pypi.nvidia.com (PyPI itself has a stub), or run in "
        "a container with such a release (nvcr.io/nvidia/tensorrt)"
    ),
}


@dataclass(frozen=True)
class Library:
    """The imported module, and the process's only logger."""

    name: Name
    trt: Any
    log: Any

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def version(self) -> str:
        return str(self.trt.__version__)

    def take_errors(self) -> list[str]:
        lines, self.log.lines[:] = list(self.log.lines), []
        return lines


@cache
def load(name: Name) -> Library:
    """Import TensorRT. Raises MissingRequirement, with installation advice, if it is missing or its release is unsupported."""
    try:
        if name == "tensorrt_rtx":
            import tensorrt_rtx as trt
        else:
            import tensorrt as trt
            import tensorrt.plugin  # an attribute of trt from here on
    except (ImportError, OSError, metadata.PackageNotFoundError) as error:
        needs = f"backend={name} needs {TITLES[name]}, which this Python cannot import ({error})"
        raise MissingRequirement(f"{needs}: {HOW_TO_GET[name]}") from error
    oldest, limit = RANGES[name]
    if not oldest <= release_of(str(trt.__version__)) < limit:
        requirement = f"{TITLES[name]} >= {'.'.join(map(str, oldest))} and < {'.'.join(map(str, limit))}"
        raise MissingRequirement(f"backend={name} needs {requirement}, found {trt.__version__}: {HOW_TO_GET[name]}")
    return Library(name, trt, _collector(trt))


def _collector(trt: Any) -> Any:
    """Return a logger that collects errors. Calls that fail return None or False, and log the reason."""

    class Collector(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.lines.append(msg)

    return Collector()
