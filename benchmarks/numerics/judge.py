"""Measurements as cells of a table, and claims as verdicts."""

from benchmarks.numerics.measure import Interval, Measurement, times, typically
from benchmarks.numerics.report import TIED, UNEXPLAINED, Claim, Verdict


def scientific(value: Interval) -> str:
    return f"{value.value:.1e} [{value.low:.1e}, {value.high:.1e}]"


def factor(value: Interval) -> str:
    return f"{value.value:.3g}x [{value.low:.3g}, {value.high:.3g}]"


def ratio(value: Interval) -> str:
    return f"{value.value:.4f} [{value.low:.4f}, {value.high:.4f}]"


COLUMNS = ("bytes/token", "mean KL", "PPL ratio", "answers")


def cells(found: Measurement) -> tuple[str, ...]:
    """The cells of COLUMNS."""
    return (
        f"{found.bytes_per_token:,}",
        scientific(found.mean_kl),
        ratio(found.perplexity_ratio),
        f"{found.accuracy:.3f}",
    )


def verdict_above(value: Interval, level: float) -> Verdict:
    """Whether something is larger than `level`."""
    if value.low > level:
        return "HOLDS"
    return "DOES NOT HOLD" if value.high < level else "UNDECIDED"


def claim(name: str, statement: str, published: str, *, ours: str, verdict: Verdict, why: str = "") -> Claim:
    """`why` explains the verdict when it is not HOLDS."""
    reason = "" if verdict == "HOLDS" else why or (TIED if verdict == "UNDECIDED" else UNEXPLAINED)
    return Claim(id=name, statement=statement, published=published, ours=ours, verdict=verdict, why=reason)


def better(name: str, statement: str, published: str, pair: tuple[Measurement, Measurement], why: str = "") -> Claim:
    """The claim that the first of the pair has a smaller mean KL than the second."""
    found, typical = times(pair[1], pair[0]), typically(pair[1], pair[0])
    ours = f"{factor(found)}, typical text {typical:.3g}x"
    return claim(name, statement, published, ours=ours, verdict=verdict_above(found, 1.0), why=why)
