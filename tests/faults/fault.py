"""What a planted fault is: a small patch of a loaded engine, and the one line that says which real fault it models."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from faults.models import mistral

EngineName = Literal["native", "graph", "torch"]
"""The ONNX engine with its compiled attention, the same with the graph's own, and the oracle as an engine of its own."""

Plant = Callable[[Any], None]
"""Patches one loaded engine in place: no class and no module, so that an engine beside it stays sound."""

POLICIES: dict[str, tuple[str, ...]] = {
    "fp16": ("kv=fp16",),
    "fp8": ("kv=fp8",),
    "int4_tensor": ("kv=int4_tensor",),
    "fp8_head": ("kv=fp8_head",),
    "fp8k_int4v": ("kv=fp8k_int4v",),
    "int8": ("kv=int8",),
    "int8_asym": ("kv=int8_asym",),
    "int8_sinks": ("kv=int8", "kv.name=int8_sinks", "kv.sink_tokens=4", "kv.recent_tokens=64"),
    "int8_groups": (
        "kv=int8",
        "kv.name=int8_groups",
        *(f"kv.{side}.{option}" for side in ("key", "value") for option in ("granularity=per_group", "group_size=32")),
    ),
    "int8_hadamard": ("kv=int8", "kv.name=int8_hadamard", "kv.key.rotation=hadamard", "kv.value.rotation=hadamard"),
    "fp8_windowed": (
        "kv=fp8k_int4v",
        "kv.name=fp8_windowed",
        "kv.window={tokens: 128, key: null, value: {dtype: fp8_e4m3, granularity: per_tensor, scale: calibrated}}",
    ),
    "fp8_streaming": ("kv=fp8_streaming", "kv.eviction={window_tokens: 512, sink_tokens: 64}"),
    "fp8_mistral": ("kv=fp8", "kv.name=fp8_mistral"),
}
"""The caches that faults are planted in, by the overrides that configure them. All but int4_tensor, which is too coarse for the
tiny model, hold up when they are sound, int8_asym with more samples than here."""

MODELS: dict[str, Callable[[Path], None]] = {"fp8_mistral": mistral}
"""What writes the model of a cache that is not the tiny model's, by the cache."""


@dataclass(frozen=True)
class Fault:
    """One fault in one engine."""

    name: str
    kind: str
    """The group that its table lists it in."""
    models: str
    """The real fault, in one line."""
    policy: str
    """The cache that it is planted in, of POLICIES."""
    plant: Plant
    engine: EngineName = "native"
    shared: bool = False
    """Whether the FP16 baseline has it as well."""
    holds: str = ""
    """The policy whose bundle the engine really holds, where that is not the one that it claims."""
    rare: bool = False
    """Whether it takes the default probe to meet it, not the small one of the other faults."""
    loads: Callable[[], AbstractContextManager[object]] = nullcontext
    """What is in place while the engine is loaded: another kernel, another graph."""
