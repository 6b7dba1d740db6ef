"""Formatting of measurements as cells of a table, and verdicts on claims."""

from benchmarks.numerics.measure import Interval, Measurement, kl_ratio, typical_kl_ratio
from benchmarks.numerics.report import TIED, UNEXPLAINED, Claim, Verdict


def scientific(value: Interval) -> str:
    """Format a KL: 1.2e-03 [1.0e-03, 1.5e-03]."""
    return f"{value.value:.1e} [{value.low:.1e}, {value.high:.1e}]"


def factor(value: Interval) -> str:
    """Format a ratio of errors: 13x [6.4, 17.5]."""
    return f"{value.value:.3g}x [{value.low:.3g}, {value.high:.3g}]"


def ratio(value: Interval) -> str:
    """Format a ratio near 1: 1.0002 [1.0001, 1.0004]."""
    return f"{value.value:.4f} [{value.low:.4f}, {value.high:.4f}]"


def share(value: float | None) -> str:
    """Format a share: 0.981, or a dash where there is none."""
    return "–" if value is None else f"{value:.3f}"


COLUMNS = ("bytes/token", "mean KL", "PPL ratio", "answers")
"""Columns that show a measurement."""


def cells(measurement: Measurement) -> tuple[str, ...]:
    """Return the cells of COLUMNS."""
    return (
        f"{measurement.bytes_per_token:,}",
        scientific(measurement.mean_kl),
        ratio(measurement.perplexity_ratio),
        share(measurement.accuracy),
    )


def verdict_above(value: Interval, level: float) -> Verdict:
    """Return the verdict on the claim that a value is larger than `level`."""
    if value.low > level:
        return "HOLDS"
    return "DOES NOT HOLD" if value.high < level else "UNDECIDED"


def claim(name: str, statement: str, published: str, *, ours: str, verdict: Verdict, why: str = "") -> Claim:
    """Return a claim.

    Args:
        name: Identifier of the claim.
        statement: What the literature states.
        published: Its figure.
        ours: What was measured.
        verdict: Whether the measurement agrees.
        why: Explanation of a verdict other than HOLDS.
    """
    reason = "" if verdict == "HOLDS" else why or (TIED if verdict == "UNDECIDED" else UNEXPLAINED)
    return Claim(id=name, statement=statement, published=published, ours=ours, verdict=verdict, why=reason)


def better(name: str, statement: str, published: str, pair: tuple[Measurement, Measurement], why: str = "") -> Claim:
    """Return the claim that the first of the pair has a smaller mean KL than the second."""
    mean, typical = kl_ratio(pair[1], pair[0]), typical_kl_ratio(pair[1], pair[0])
    ours = f"{factor(mean)}, typical text {typical:.3g}x"
    return claim(name, statement, published, ours=ours, verdict=verdict_above(mean, 1.0), why=why)
