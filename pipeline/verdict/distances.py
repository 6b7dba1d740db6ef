"""Gates on the distances between the two engines' next-token distributions, and the canary, which they have to fail.

Each function returns lines of the verdict's table for `pipeline.verdict.gates.decide`. Means are tested by bets,
and shares of rare events by exact bounds of counts, both of `pipeline.statistics.bounds`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from pipeline.statistics import bounds
from pipeline.statistics.bootstrap import pooled_slope
from pipeline.statistics.looks import Look
from pipeline.verdict.conformance import allowed
from pipeline.verdict.record import finite
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Check, Gates, LineStatus, Status

OUTLIER = 4.0
"""A document counts at most as this many times the limit where a mean has to pass, and a request whose KL is beyond that is
ruined, whatever its KL: how many are has a gate of its own. No mean of so heavy tails can be bounded otherwise."""
TAIL_SHARE = 0.001
"""Share of all tokens that may be above `max_p999_kl`."""
TOKEN_CORRELATION = 0.01
"""What the correlation of such tokens within a document is taken for before there are any; measured were 0.001 at most."""
LADDER = "ladder"
"""The line on the canary's small faults."""
MEAN_DISTANCES = 4
"""Distances of each workload that `distance_by_workload` tests."""


def distance_by_workload(rows: Sequence[SampleRow], gates: Gates, lines: int) -> list[Check]:
    """Test the mean distances of every workload: the same at every look, because a bet may be looked at at any time.

    A few texts without answers (below 15 documents) beside samples with answers can fail, and else warn: they cannot show that
    they are within a limit.

    Args:
        rows: The samples at one look.
        gates: The thresholds.
        lines: Distances that are tested together, which share `alpha` for a FAIL.
    """
    answered = any(row.judged for row in rows)
    checks = []
    for workload in sorted({row.workload for row in rows}):
        of_workload = [row for row in rows if row.workload == workload]
        workload_checks = [d.check(workload, gates.alpha / lines, gates.pass_alpha) for d in _distances(of_workload, gates)]
        if answered and not any(row.judged for row in of_workload) and not _can_pass(of_workload, gates):
            warning = {"status": "WARNING"}
            workload_checks = [c.model_copy(update=warning) if c.status == "INCONCLUSIVE" else c for c in workload_checks]
        checks += workload_checks
    return checks


def _can_pass(rows: Sequence[SampleRow], gates: Gates) -> bool:
    """Whether these are enough documents for an engine that is equal to the baseline."""
    equal = np.zeros(len({row.document for row in rows}))
    return bounds.log_wealth_below(equal, 1.0, OUTLIER) >= -math.log(gates.pass_alpha)


@dataclass(frozen=True)
class Distance:
    """A distance that is worse when it is larger, as the bets take it: a value for each document."""

    gate: str
    label: str
    threshold: float
    """As it is configured and shown."""
    values: bounds.Array
    """Mean over the tokens, or the answers, of each document, shape (documents,)."""
    limit: float
    """The threshold as a mean of such values."""
    best: float
    """Values below count as this."""
    shown: Callable[[float], float]
    """From a mean of such values to what is configured and shown."""

    @property
    def worst(self) -> float:
        """What a value above counts as, where a PASS is asked."""
        return OUTLIER * self.limit

    def status(self, fail_level: float, pass_level: float) -> Status:
        """Return FAIL where the mean is clearly above the limit, PASS where it is clearly below with outliers cut."""
        if not np.isfinite(self.values).all():
            return "FAIL"
        if bounds.log_wealth_above(self._raw, self.limit, self.best) >= -math.log(fail_level):
            return "FAIL"
        return "PASS" if bounds.log_wealth_below(self._cut, self.limit, self.worst) >= -math.log(pass_level) else "INCONCLUSIVE"

    @property
    def _raw(self) -> bounds.Array:
        return np.maximum(self.values, self.best)

    @property
    def _cut(self) -> bounds.Array:
        return np.clip(self.values, self.best, self.worst)

    def check(self, where: str, fail_level: float, pass_level: float) -> Check:
        status = self.status(fail_level, pass_level)
        if not np.isfinite(self.values).all():
            mean = bound = math.nan
        elif status == "FAIL":
            mean, bound = float(self._raw.mean()), bounds.lower_bound(self._raw, fail_level, self.best)
        else:
            mean, bound = float(self._cut.mean()), bounds.upper_bound(self._cut, pass_level, self.worst)
        level = fail_level if status == "FAIL" else pass_level
        return _line(self.gate, where, self.label, self.shown(mean), self.shown(bound), level, self.threshold, status)


def _line(
    gate: str, where: str, label: str, value: float, bound: float, level: float, threshold: float, status: LineStatus
) -> Check:
    """Return the line of a distance with its bound at `level`."""
    limit = "at least" if gate.startswith("min_") else "at most"
    judgement = {"PASS": "within", "FAIL": "outside"}.get(status, "not clearly within")
    text = (
        f"{where}: {label} {value:.4g}, {100 * (1 - level):.4g} % bound {bound:.4g}, {judgement} {gate} ({limit} {threshold:g})"
    )
    return Check(
        gate=gate, where=where, value=finite(value), bound=finite(bound), threshold=threshold, status=status, reason=text
    )


def _distances(rows: Sequence[SampleRow], gates: Gates) -> Iterator[Distance]:
    tokens, documents = [row.scored_tokens for row in rows], [row.document for row in rows]
    ppl = math.log(gates.max_ppl_ratio)

    def means(value: Callable[[SampleRow], float | None]) -> bounds.Array:
        numbers = (value(row) for row in rows)
        return bounds.by_document([math.nan if v is None else v for v in numbers], tokens, documents)

    kl = means(lambda row: row.mean_kl)
    yield Distance("max_mean_kl", "mean KL", gates.max_mean_kl, kl, gates.max_mean_kl, 0.0, float)
    loss = 1 - means(lambda row: row.top10_overlap)
    least = gates.min_top10_overlap
    yield Distance("min_top10_overlap", "top-10 overlap", least, loss, 1 - least, 0.0, lambda mean: 1 - mean)
    nll = means(_nll_difference)
    yield Distance("max_ppl_ratio", "PPL ratio", gates.max_ppl_ratio, nll, ppl, -OUTLIER * ppl, _exp)
    squared = means(lambda row: row.mean_squared_delta_p)
    rms = gates.max_rms_delta_p
    yield Distance("max_rms_delta_p", "RMS change of p", rms, squared, rms * rms, 0.0, math.sqrt)


def _nll_difference(row: SampleRow) -> float | None:
    return None if row.candidate_nll is None or row.baseline_nll is None else row.candidate_nll - row.baseline_nll


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


@dataclass(frozen=True)
class _Events:
    """Counts of rare events, by document."""

    sums: bounds.Array
    """Events of each document, shape (documents,)."""
    sizes: bounds.Array
    """Samples or tokens of each document."""
    correlation: float
    """How alike those of one document are taken to be, as far as the counts do not show it."""

    @classmethod
    def of(cls, events: Sequence[float], sizes: Sequence[float], documents: Sequence[str], correlation: float) -> "_Events":
        _, index = np.unique(np.asarray(documents), return_inverse=True)
        counted, measured = (np.bincount(index, weights=column).astype(np.float64) for column in (events, sizes))
        return cls(counted, measured, correlation)

    def check(self, gate: str, label: str, share: float, levels: tuple[float, float], unclear: LineStatus) -> Check:
        """Test the share of events against `share`, at the levels of a FAIL and of a PASS; `unclear` is neither."""
        count, n = float(self.sums.sum()), float(self.sizes.sum())
        effect = bounds.design_effect(self.sums, self.sums, self.sizes, self.correlation)
        fail_level, pass_level = levels
        lowest = bounds.share_bound(count / effect, n / effect, fail_level, lower=True)
        highest = bounds.share_bound(count / effect, n / effect, pass_level, lower=False)
        status: LineStatus = "FAIL" if lowest > share else "PASS" if highest <= share else unclear
        bound, level = (lowest, fail_level) if status == "FAIL" else (highest, pass_level)
        text = f"{label}: {count:.0f} of {n:,.0f}"
        return _line(gate, "all", text + ", share", count / n, bound, level, share, status)


def rare(rows: Sequence[SampleRow], gates: Gates, look: Look, lines: int) -> list[Check]:
    """Bound the share of ruined requests, and the share of tokens whose KL is above `max_p999_kl`, over all workloads.

    A PASS needs the first to be shown. The second takes thousands of tokens: where they do not show it, that is a WARNING.
    """
    levels = look.fail_level(gates.alpha / lines), look.pass_level(gates.pass_alpha)
    documents = [row.document for row in rows]
    ruin = OUTLIER * gates.max_mean_kl
    ruined = [float(row.mean_kl is None or not row.mean_kl <= ruin) for row in rows]
    requests = _Events.of(ruined, [1.0] * len(rows), documents, bounds.EVENT_CORRELATION)
    far = [float(sum(kl > gates.max_p999_kl for kl in row.kl_tail)) for row in rows]
    tokens = _Events.of(far, [row.scored_tokens for row in rows], documents, TOKEN_CORRELATION)
    return [
        requests.check(
            "max_ruined_share", f"requests with a mean KL above {ruin:g}", gates.max_ruined_share, levels, "INCONCLUSIVE"
        ),
        tokens.check("max_p999_kl", f"tokens with a KL above {gates.max_p999_kl:g}", TAIL_SHARE, levels, "WARNING"),
    ]


def jointly_tested(rows: Sequence[SampleRow], drafters: int = 0) -> int:
    """Return how many distances are tested together: of each workload with its slope and drafters, and of `rare`."""
    answered = len({row.workload for row in rows if row.judged})
    return (MEAN_DISTANCES + 1) * len({row.workload for row in rows}) + drafters * answered + 2


def slope_by_workload(rows: Sequence[SampleRow], gates: Gates, look: Look, lines: int) -> list[Check]:
    """Test the growth of each workload's KL with the context.

    FAIL: it clearly grows faster than `max_kl_slope`. PASS: it is shown not to. WARNING: neither, which keeps no candidate from
    passing, because the contexts of most workloads are too alike to show it. Workloads with fewer than `min_samples` documents
    have no line: a few nearly always lie on a line.
    """
    checks = []
    for workload in sorted({row.workload for row in rows}):
        of_workload = [row for row in rows if row.workload == workload]
        documents = [row.document for row in of_workload]
        count = len(set(documents))
        x = np.array([row.context_tokens / 1000 for row in of_workload])
        if count < gates.min_samples or np.ptp(x) == 0:
            continue
        y = np.array([min(row.mean_kl or 0.0, OUTLIER * gates.max_mean_kl) for row in of_workload])
        slope, error = bounds.clustered_slope(x, y, documents)
        level = look.fail_level(gates.alpha / lines)
        low = slope + float(stdtrit(count - 2, level)) * error
        high = slope - float(stdtrit(count - 2, gates.alpha)) * error
        limit = gates.max_kl_slope
        status: LineStatus = "FAIL" if low > limit else "PASS" if high <= limit else "WARNING"
        bound, level = (low, level) if status == "FAIL" else (high, gates.alpha)
        checks.append(_line("max_kl_slope", workload, "growth of KL per 1k tokens", slope, bound, level, limit, status))
    return checks


def kl_slope(rows: Sequence[SampleRow]) -> tuple[float, bounds.Array]:
    """Return the slope of the mean KL per 1,000 tokens of context within workloads, and its bootstrap by document."""
    return pooled_slope(
        np.array([row.context_tokens / 1000 for row in rows]),
        np.array([math.nan if row.mean_kl is None else row.mean_kl for row in rows]),
        np.array([row.scored_tokens for row in rows], dtype=np.float64),
        [row.workload for row in rows],
        [row.document for row in rows],
    )


def canary(report: EvaluationReport, gates: Gates) -> list[Check]:
    """Return FAIL unless the same gates would have failed the engine whose key scales were corrupted.

    A corrupted engine whose logits are not finite counts as noticed.
    """
    rows = report.canary.rows
    kl, noticed = _noticed(rows, gates)
    measured = f"canary: with key scales x {report.canary.factor:g} the mean KL is {kl:.3g}"
    unnoticed = ", and no gate noticed: the evaluation does not see the cache" if rows else "; it did not run"
    return [
        Check(
            gate="canary",
            where="canary",
            value=finite(kl),
            bound=None,
            threshold=gates.max_mean_kl,
            status="PASS" if noticed else "FAIL",
            reason=measured + (", noticed" if noticed else unnoticed),
        )
    ]


def ladder(report: EvaluationReport, gates: Gates) -> list[Check]:
    """Say which of the canary's smaller faults these gates noticed. It decides nothing: it says how far a PASS reaches.

    Reports without a ladder have no line.
    """
    rungs = report.canary.ladder
    if not rungs:
        return []
    conformance = report.conformance
    judged = conformance is not None and conformance.compute_dtype is not None
    limit = allowed(conformance.baseline.requests) if conformance is not None and judged else math.inf
    noticed = [
        rung.fault
        for rung in rungs
        if _noticed(rung.rows, gates)[1] or any(request.times_allowed(limit) > 1 for request in rung.requests)
    ]
    missed = [rung.fault for rung in rungs if rung.fault not in noticed]
    words = [f"{what}: {', '.join(faults)}" for what, faults in (("noticed", noticed), ("not", missed)) if faults]
    reason = f"planted faults {'; '.join(words)}"
    return [Check(gate=LADDER, where="canary", value=len(noticed), bound=None, threshold=None, status="PASS", reason=reason)]


def _noticed(rows: Sequence[SampleRow], gates: Gates) -> tuple[float, bool]:
    """Return the mean KL of a corrupted engine's samples, NaN without any, and whether the distances would fail it."""
    measured = list(_distances(rows, gates)) if rows else []
    noticed = any(distance.status(gates.alpha, gates.pass_alpha) == "FAIL" for distance in measured)
    return (float(measured[0].values.mean()) if measured else math.nan), noticed
