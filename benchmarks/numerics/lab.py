"""Benches that the sections share, and short constructors of formats and policies."""

from collections.abc import Mapping
from functools import cached_property

from benchmarks.numerics.measure import Bench, Measurement
from benchmarks.numerics.models import Variant, load
from benchmarks.numerics.scales import cached_states
from benchmarks.numerics.texts import COUNTS, LONG_DOCUMENTS, Text, calibration_texts, long_documents, questions_and_prose
from pipeline.core.formats import Format, Granularity, Rotation
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


def uncalibrated(dtype: str) -> Format:
    """Return a format with a static scale of 1."""
    return Format(dtype=dtype, granularity="per_tensor", scale="uncalibrated")


def policy(key: Format, value: Format | None = None, sinks: int = 0, recent: int = 0) -> KVPolicy:
    """Return a policy with keys in one format and values in another one, or in the same one by default."""
    return KVPolicy(name="measured", key=key, value=value or key, sink_tokens=sinks, recent_tokens=recent)


class Lab:
    """The benches, each built on first use.

    Args:
        progress: Reports the progress of each measurement.
        counts: Texts of each workload.
        long_count: Long documents.
    """

    def __init__(self, progress: Progress, counts: Mapping[str, int] = COUNTS, long_count: int = LONG_DOCUMENTS) -> None:
        self.counts, self.long_count = counts, long_count
        self._progress = progress
        self._benches: dict[Variant, Bench] = {}

    @cached_property
    def texts(self) -> list[Text]:
        """Questions and prose that every model is measured on."""
        return questions_and_prose(self.counts)

    @cached_property
    def long(self) -> Bench:
        """The bench of long documents on the shipped model."""
        shipped = self.bench("shipped")
        return Bench("long documents,", shipped.model, long_documents(self.long_count), shipped.states, self._progress)

    def bench(self, variant: Variant) -> Bench:
        """Return the bench of questions and prose on a variant of the model."""
        if variant not in self._benches:
            model = load(variant)
            states = cached_states(model, calibration_texts())
            self._benches[variant] = Bench(variant, model, self.texts, states, self._progress)
        return self._benches[variant]

    def shipped(self, kv_policy: KVPolicy) -> Measurement:
        """Measure a policy on the shipped model."""
        return self.bench("shipped").measure(kv_policy)

    def natural(self, kv_policy: KVPolicy) -> Measurement:
        """Measure a policy on the model without planted outliers."""
        return self.bench("natural").measure(kv_policy)
