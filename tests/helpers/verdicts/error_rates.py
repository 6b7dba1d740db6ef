"""Limits on error rates that tests measure by simulation."""

import math


def at_most(rate: float, runs: int) -> float:
    """Return the limit that the share among `runs` exceeds with a probability of 1/1,000 if the true rate is `rate`."""
    return rate + 3.1 * math.sqrt(rate * (1 - rate) / runs)
