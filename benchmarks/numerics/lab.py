"""Benches that the sections share, and short constructors of formats and policies."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from transformers import LlamaForCausalLM

from benchmarks.numerics.explanations import WHY
from benchmarks.numerics.measure import Bench, Measurement
from benchmarks.numerics.scales import CachedStates, cached_states
from benchmarks.numerics.store import Store
from benchmarks.numerics.subject import Subject, Text, Variant
from pipeline.checkpoint.exports import NVFP4
from pipeline.core.formats import BlockScale, Format, Granularity, Rotation
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Progress

EXACT = Format(dtype="fp16")
"""Format of an unquantized side."""


def dynamic(dtype: str, group: int | None = None, symmetric: bool = True, rotation: Rotation = "none") -> Format:
    """Return a format with dynamic scales: per token and head, or per `group` channels of it."""
    granularity: Granularity = "per_token" if group is None else "per_group"
    return Format(
        dtype=dtype, granularity=granularity, group_size=group, symmetric=symmetric, scale="dynamic", rotation=rotation
    )


def static(dtype: str, granularity: Granularity = "per_tensor", symmetric: bool = True, rotation: Rotation = "none") -> Format:
    """Return a format with calibrated, static scales."""
    return Format(dtype=dtype, granularity=granularity, symmetric=symmetric, scale="calibrated", rotation=rotation)


def blocks(block_scale: BlockScale) -> Format:
    """Return NVFP4 with scales of blocks that are chosen in this way."""
    return NVFP4.model_copy(update={"block_scale": block_scale})


def uncalibrated(dtype: str) -> Format:
    """Return a format with a static scale of 1."""
    return Format(dtype=dtype, granularity="per_tensor", scale="uncalibrated")


def policy(key: Format, value: Format | None = None, sinks: int = 0, recent: int = 0) -> KVPolicy:
    """Return a policy with keys in one format and values in another one, or in the same one by default."""
    return KVPolicy(name="measured", key=key, value=value or key, sink_tokens=sinks, recent_tokens=recent)


class Lab:
    """The benches of a subject, each built on first use.

    Args:
        subject: The model and its texts.
        work: Folder that measurements are kept in.
        progress: Reports the progress of each measurement.
    """

    def __init__(self, subject: Subject, work: Path, progress: Progress) -> None:
        self.subject = subject
        self._progress, self._store = progress, Store(work / subject.name, subject.checkpoint)
        self._models: dict[Variant, tuple[LlamaForCausalLM, CachedStates]] = {}
        self._benches: dict[tuple[Variant, str], Bench] = {}

    @cached_property
    def long(self) -> Bench:
        """The bench of long documents on the shipped model."""
        return self._bench("shipped", "long documents", self.subject.long)

    @cached_property
    def questions(self) -> Bench:
        """The bench of texts with answers, on the shipped model."""
        subject = self.subject
        return (
            self.bench("shipped")
            if subject.questions == subject.texts
            else self._bench("shipped", "questions", subject.questions)
        )

    def bench(self, variant: Variant) -> Bench:
        """Return the bench of the texts on a variant of the model."""
        return self._bench(variant, "texts", self.subject.texts)

    def shipped(self, kv_policy: KVPolicy) -> Measurement:
        """Measure a policy on the shipped model."""
        return self.bench("shipped").measure(kv_policy)

    def natural(self, kv_policy: KVPolicy) -> Measurement:
        """Measure a policy on the model without planted outliers."""
        return self.bench("natural").measure(kv_policy)

    def why(self, claim: str, **figures: float) -> str:
        """Return the explanation of a verdict other than HOLDS on this subject, "" where none is written."""
        return WHY[self.subject.name].get(claim, "").format(**figures)

    def _bench(self, variant: Variant, kind: str, texts: Sequence[Text]) -> Bench:
        if (variant, kind) not in self._benches:
            if variant not in self._models:
                model = self.subject.load(variant)
                self._models[variant] = model, cached_states(model, self.subject.calibration)
            model, states = self._models[variant]
            name = f"{self.subject.name}, {variant}, {kind}"
            self._benches[variant, kind] = Bench(name, model, texts, states, self._progress, self._store)
        return self._benches[variant, kind]
