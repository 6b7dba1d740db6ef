"""What the counts of a snapshot show about a class: pure arithmetic.

A monitor is a share of good requests with a least that it may be. It is **broken** where the exact one-sided upper bound of
the share is below that (Clopper-Pearson at `monitor.alpha`), it **holds** where the lower bound is not below it, and between
the two it is **unknown**: too few requests to tell. Noise moves nothing. The bounds take requests for independent of each
other.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.routing.files import ClassSnapshot, Share
from pipeline.routing.settings import MonitorConfig
from pipeline.statistics.bounds import share_bound

Status = Literal["holds", "broken", "unknown"]


@dataclass(frozen=True)
class Reading:
    """One monitor of one class."""

    name: str
    status: Status
    text: str


@dataclass(frozen=True)
class Readings:
    """All monitors of one class."""

    latency: Reading
    quality: tuple[Reading, ...]
    """JSON validity and canaries, as far as the class has them."""
    memory: Reading
    """Broken is pressure. It is counted of all tokens, so that it is never unknown."""

    @property
    def all(self) -> tuple[Reading, ...]:
        return (self.latency, *self.quality, self.memory)

    @property
    def quality_is_broken(self) -> bool:
        return any(reading.status == "broken" for reading in self.quality)

    @property
    def quality_holds(self) -> bool:
        """Whether there is a monitor of quality, and every one of them is shown to hold."""
        return bool(self.quality) and all(reading.status == "holds" for reading in self.quality)


def read_monitors(snapshot: ClassSnapshot, limits: MonitorConfig) -> Readings:
    """Return what the counts of a class show."""
    quality = (
        ("JSON validity", snapshot.json_validity, limits.min_json_validity),
        ("canaries", snapshot.canaries, limits.min_canary_accuracy),
    )
    latency, memory = snapshot.latency, snapshot.memory
    used = memory.live_tokens / memory.max_tokens
    return Readings(
        latency=_reading(f"latency within {latency.limit_ms:g} ms", latency, limits.min_within_limit, limits.alpha),
        quality=tuple(_reading(name, share, least, limits.alpha) for name, share, least in quality if share is not None),
        memory=Reading(
            "memory",
            "broken" if used > limits.max_live_share else "holds",
            f"{memory.live_tokens:,} of {memory.max_tokens:,} tokens live, pressure above {limits.max_live_share:.0%}",
        ),
    )


def _reading(name: str, share: Share, least: float, alpha: float) -> Reading:
    upper = share_bound(share.good, share.of, alpha, lower=False)
    lower = share_bound(share.good, share.of, alpha, lower=True)
    status: Status = "broken" if upper < least else "holds" if lower >= least else "unknown"
    seen = f"{share.good:,} of {share.of:,}, {100 * (1 - alpha):g} % bounds {lower:.4f} to {upper:.4f}, least {least:g}"
    return Reading(name, status, seen)
