"""Limits on error rates that tests measure by simulation."""

import math


def at_most(rate: float, runs: int) -> float:
    """Return the share among `runs` that a true rate exceeds with a probability of 1/1,000."""
    return rate + 3.1 * math.sqrt(rate * (1 - rate) / runs)
