"""An injected fault: a small patch of a loaded engine, and a one-line description of the real fault that it models."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from faults.hooks import Plant


@dataclass(frozen=True)
class Fault:
    """A fault in one engine."""

    kind: str
    """Group of the fault in docs/faults.md."""
    name: str
    models: str
    """One-line description of the real fault."""
    plant: Plant
    loads: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager for loading the engine with the fault, for example with another kernel."""
