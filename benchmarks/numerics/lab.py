"""What the sections share: the benches, and short names for formats and policies."""

from collections.abc import Mapping
from functools import cached_property

from benchmarks.numerics.measure import Bench, Measurement
from benchmarks.numerics.models import Variant, load
from benchmarks.numerics.scales import observe
from benchmarks.numerics.texts import COUNTS, LONG_DOCUMENTS, Text, calibration_texts, long_documents, questions_and_prose
from pipeline.core.formats import Format, Granularity, Rotation
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Progress

EXACT = Format(dtype="fp16")


def dynamic(dtype: str, group: int | None = None, symmetric: bool = True, rotation: Rotation = "none") -> Format:
    """A scale per token and head, or per group of channels of it."""
    granularity: Granularity = "per_token" if group is None else "per_group"
    return Format(
        dtype=dtype, granularity=granularity, group_size=group, symmetric=symmetric, scale="dynamic", rotation=rotation
    )


def static(dtype: str, granularity: Granularity = "per_tensor", symmetric: bool = True, rotation: Rotation = "none") -> Format:
    """Calibrated scales, fixed beforehand."""
    return Format(dtype=dtype, granularity=granularity, symmetric=symmetric, scale="calibrated", rotation=rotation)


def uncalibrated(dtype: str) -> Format:
    return Format(dtype=dtype, granularity="per_tensor", scale="uncalibrated")


def policy(key: Format, value: Format | None = None, sinks: int = 0, recent: int = 0) -> KVPolicy:
    """Both sides in one format unless `value` says otherwise."""
    return KVPolicy(name="measured", key=key, value=value or key, sink_tokens=sinks, recent_tokens=recent)


class Lab:
    """The benches, each made when first asked for."""

    def __init__(self, progress: Progress, counts: Mapping[str, int] = COUNTS, long_count: int = LONG_DOCUMENTS) -> None:
        self.counts, self.long_count = counts, long_count
        self._progress = progress
        self._benches: dict[Variant, Bench] = {}

    @cached_property
    def texts(self) -> list[Text]:
        return questions_and_prose(self.counts)

    @cached_property
    def long(self) -> Bench:
        """Long documents, on the shipped model."""
        shipped = self.bench("shipped")
        return Bench("long documents,", shipped.model, long_documents(self.long_count), shipped.observed, self._progress)

    def bench(self, variant: Variant) -> Bench:
        if variant not in self._benches:
            model = load(variant)
            observed = observe(model, calibration_texts())
            self._benches[variant] = Bench(variant, model, self.texts, observed, self._progress)
        return self._benches[variant]

    def shipped(self, chosen: KVPolicy) -> Measurement:
        return self.bench("shipped").measure(chosen)

    def natural(self, chosen: KVPolicy) -> Measurement:
        return self.bench("natural").measure(chosen)
