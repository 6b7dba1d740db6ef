"""What a planted fault is: a small patch of a loaded engine, and the one line that says which real fault it models."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from faults.hooks import Plant
from faults.models import mistral
from stages.engines.paged.prefixes import PrefixCache

EngineName = Literal["native", "graph", "torch"]
"""The ONNX engine with its compiled attention, the same with the graph's own, and the oracle as an engine of its own."""

Harm = Literal["answers", "memory", "claim", "rare"]
"""What a fault costs: answers, memory that nobody counted, a word that is not kept, or answers more seldom than once a day."""

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
    "int8_prefixes": ("kv=int8", "kv.name=int8_prefixes"),
    "fp8_windowed": (
        "kv=fp8k_int4v",
        "kv.name=fp8_windowed",
        "kv.window={tokens: 128, key: null, value: {dtype: fp8_e4m3, granularity: per_tensor, scale: calibrated}}",
    ),
    "fp8_streaming": ("kv=fp8_streaming", "kv.eviction={window_tokens: 832, sink_tokens: 64}"),
    "fp8_mistral": ("kv=fp8", "kv.name=fp8_mistral"),
}
"""The caches that faults are planted in, by the overrides that configure them. All but int4_tensor, which is too coarse for the
tiny model, hold up when they are sound, int8_asym with more samples than here."""

MODELS: dict[str, Callable[[Path], None]] = {"fp8_mistral": mistral}
"""What writes the model of a cache that is not the tiny model's, by the cache."""

KEPT_CHUNK, KEPT_TOKENS = 128, 2048
"""How the beginnings of prompts are kept: in chunks of so many tokens, and how many at most."""


def keeps_prefixes(engine: Any) -> None:
    """Let an engine keep the beginnings of prompts for later ones."""
    engine.prefill_chunk = KEPT_CHUNK
    engine.prefixes = PrefixCache(engine, chunk=KEPT_CHUNK, most_tokens=KEPT_TOKENS)


SETUPS: dict[str, Callable[[Any], None]] = {"int8_prefixes": keeps_prefixes}
"""What is done to every engine of a cache when it is loaded, sound or not."""


TABLES = {"turns": "positions", "crowds": "pages", "prompts": "serving", "prefixes": "serving"}
"""Kinds whose faults are listed in a module of another name."""


@dataclass(frozen=True)
class Fault:
    """One fault in one engine."""

    kind: str
    """The group that its table lists it in."""
    name: str
    policy: str
    """The cache that it is planted in, of POLICIES."""
    models: str
    """The real fault, in one line."""
    plant: Plant
    by: str = "probe"
    """The gate that is expected to see it."""
    engine: EngineName = "native"
    harm: Harm = "answers"
    shared: bool = False
    """Whether the FP16 baseline has it as well."""
    holds: str = ""
    """The policy whose bundle the engine really holds, where that is not the one that it claims."""
    loads: Callable[[], AbstractContextManager[object]] = nullcontext
    """What is in place while the engine is loaded: another kernel, another graph."""
    where: str = ""
    """Where it acts, where the plant does not say."""

    @property
    def acts(self) -> str:
        """Where it acts."""
        return self.where or self.plant.where

    @property
    def module(self) -> str:
        """The module of its table, whose text decides what it does."""
        return f"faults.{TABLES.get(self.kind, self.kind)}"
