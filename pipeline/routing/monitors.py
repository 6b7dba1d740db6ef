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

    def reading(name: str, share: Share, least: float) -> Reading:
        upper, lower = (share_bound(share.good, share.of, limits.alpha, lower=side) for side in (False, True))
        status: Status = "broken" if upper < least else "holds" if lower >= least else "unknown"
        bounds = f"{100 * (1 - limits.alpha):g} % bounds {lower:.4f} to {upper:.4f}"
        return Reading(name, status, f"{share.good:,} of {share.of:,}, {bounds}, least {least:g}")

    quality = (
        ("JSON validity", snapshot.json_validity, limits.min_json_validity),
        ("canaries", snapshot.canaries, limits.min_canary_accuracy),
    )
    latency, memory, most = snapshot.latency, snapshot.memory, limits.max_live_share
    tokens = f"{memory.live_tokens:,} of {memory.max_tokens:,} tokens live, pressure above {most:.0%}"
    return Readings(
        latency=reading(f"latency within {latency.limit_ms:g} ms", latency, limits.min_within_limit),
        quality=tuple(reading(name, share, least) for name, share, least in quality if share is not None),
        memory=Reading("memory", "broken" if memory.live_tokens / memory.max_tokens > most else "holds", tokens),
    )
