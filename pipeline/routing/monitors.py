"""What the counts of a snapshot show about a class: pure arithmetic.

A monitor is a share of good requests with a least that it may be. It is **broken** where the exact one-sided upper bound of
the share is below that (Clopper-Pearson at `monitor.alpha`), it **holds** where the lower bound is not below it, and between
the two it is **unknown**: too few requests to tell. Noise moves nothing. The bounds take requests for independent of each
other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline import statistics
from pipeline.routing.files import ClassSnapshot, MonitorConfig, Share

Status = Literal["holds", "broken", "unknown"]
Kind = Literal["latency", "quality", "memory"]


@dataclass(frozen=True)
class Reading:
    kind: Kind
    """Of quality are JSON validity and canaries. Broken memory is pressure: all tokens are counted, so it is never unknown."""
    name: str
    status: Status
    text: str


def quality_holds(readings: Sequence[Reading]) -> bool:
    """Whether there is a monitor of quality, and every one of them is shown to hold."""
    return {reading.status for reading in readings if reading.kind == "quality"} == {"holds"}


def read_monitors(snapshot: ClassSnapshot, limits: MonitorConfig) -> list[Reading]:

    def reading(kind: Kind, name: str, share: Share, least: float) -> Reading:
        upper, lower = (statistics.bounds.share_bound(share.good, share.of, limits.alpha, lower=side) for side in (False, True))
        status: Status = "broken" if upper < least else "holds" if lower >= least else "unknown"
        bounds = f"{100 * (1 - limits.alpha):g} % bounds {lower:.4f} to {upper:.4f}"
        return Reading(kind, name, status, f"{share.good:,} of {share.of:,}, {bounds}, least {least:g}")

    latency, memory, most = snapshot.latency, snapshot.memory, limits.max_live_share
    found = [reading("latency", f"latency within {latency.limit_ms:g} ms", latency, limits.min_within_limit)]
    if snapshot.json_validity is not None:
        found.append(reading("quality", "JSON validity", snapshot.json_validity, limits.min_json_validity))
    if snapshot.canaries is not None:
        found.append(reading("quality", "canaries", snapshot.canaries, limits.min_canary_accuracy))
    pressure = memory.live_tokens / memory.max_tokens > most
    tokens = f"{memory.live_tokens:,} of {memory.max_tokens:,} tokens live, pressure above {most:.0%}"
    return [*found, Reading("memory", "memory", "broken" if pressure else "holds", tokens)]
