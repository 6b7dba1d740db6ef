"""An injected fault: a small patch of a loaded engine, and a one-line description of the real fault that it models."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from faults.hooks import Plant
from stages.engines.paged.prefixes import PrefixCache

KEPT_CHUNK, KEPT_TOKENS = 128, 2048
"""Chunk size of kept prefixes, and maximum number of kept tokens."""


def keeps_prefixes(engine: Any) -> None:
    """Enable prefix caching in an engine."""
    engine.prefill_chunk = KEPT_CHUNK
    engine.prefixes = PrefixCache(engine, chunk=KEPT_CHUNK, most_tokens=KEPT_TOKENS)


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
