"""A planted fault: a small patch of a loaded engine, and a one-line description of the real fault that it models."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from faults.hooks import Plant
from faults.models import mistral
from stages.engines.paged.prefixes import PrefixCache

EngineName = Literal["native", "graph", "torch"]
"""The ONNX engine with compiled attention, the ONNX engine with the graph's own attention, and the reference backend."""

POLICIES: dict[str, tuple[str, ...]] = {
    "fp16": ("kv=fp16",),
    "fp8": ("kv=fp8",),
    "int4_tensor": ("kv=int4_tensor",),
    "fp8k_int4v": ("kv=fp8k_int4v",),
    "int8": ("kv=int8",),
    "int8_sinks": ("kv=int8", "kv.name=int8_sinks", "kv.sink_tokens=4", "kv.recent_tokens=64"),
    "int8_groups": (
        "kv=int8",
        "kv.name=int8_groups",
        *(f"kv.{side}.{option}" for side in ("key", "value") for option in ("granularity=per_group", "group_size=32")),
    ),
    "int8_prefixes": ("kv=int8", "kv.name=int8_prefixes"),
    "fp8_windowed": (
        "kv=fp8k_int4v",
        "kv.name=fp8_windowed",
        "kv.window={tokens: 128, key: null, value: {dtype: fp8_e4m3, granularity: per_tensor, scale: calibrated}}",
    ),
    "fp8_streaming": ("kv=fp8_streaming", "kv.eviction={window_tokens: 768, sink_tokens: 64}"),
    "fp8_mistral": ("kv=fp8", "kv.name=fp8_mistral"),
}
"""Configuration overrides of every cache that faults are planted in.

Sound engines pass with every cache except int4_tensor, which is too coarse for the tiny model.
"""

MODELS: dict[str, Callable[[Path], None]] = {"fp8_mistral": mistral}
"""Cache -> function that writes its model; all other caches use the tiny model."""

KEPT_CHUNK, KEPT_TOKENS = 128, 2048
"""Chunk size of kept prefixes, and maximum number of kept tokens."""


def keeps_prefixes(engine: Any) -> None:
    """Enable prefix caching in an engine."""
    engine.prefill_chunk = KEPT_CHUNK
    engine.prefixes = PrefixCache(engine, chunk=KEPT_CHUNK, most_tokens=KEPT_TOKENS)


SETUPS: dict[str, Callable[[Any], None]] = {"int8_prefixes": keeps_prefixes}
"""Cache -> set-up of its engines after loading, whether sound or faulty."""


@dataclass(frozen=True)
class Fault:
    """A fault in one engine."""

    kind: str
    """Group of the fault on the page."""
    name: str
    policy: str
    """Key of POLICIES: the cache that the fault is planted in."""
    models: str
    """One-line description of the real fault."""
    plant: Plant
    by: str = "stress_test"
    """The gate that is expected to fail."""
    engine: EngineName = "native"
    shared: bool = False
    """Whether the FP16 baseline has the fault too."""
    holds: str = ""
    """Policy of the bundle that the engine really loads, if it differs from the claimed policy."""
    loads: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context manager for loading the engine, for example with another kernel or graph."""
    where: str = ""
    """Location of the fault, if the plant does not describe it."""

    @property
    def acts(self) -> str:
        """Location of the fault."""
        return self.where or self.plant.where
