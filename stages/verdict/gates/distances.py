"""The gates on distances from the baseline's next-token distributions: workload means, ruined requests, and far tokens."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from stages.verdict import statistics
from stages.verdict.gate import Figure, GateInput, by_workload
from stages.verdict.report import SampleRow
from stages.verdict.thresholds import Gates

if TYPE_CHECKING:
    from stages.verdict.statistics.bets import Array, Result

TAIL_SHARE = 0.001
"""Share of a document's tokens that may be above `max_p999_kl`."""
NONE_OF = 60
"""Number of requests that pass without any ruined one, even if they cannot show `max_ruined_share` statistically."""


def measured(rows: Sequence[SampleRow], gates: Gates, where: str = "", *, must_pass: bool = True) -> Iterator[Figure]:
    """Yield the figures on the mean distances of some samples."""
    tokens, mean = [row.scored_tokens for row in rows], statistics.bets.Mean

    def figure(key: str, label: str, of: "statistics.bets.Mean", **how: object) -> Figure:
        return Figure(key, where, of, getattr(gates, key), label, must_pass=must_pass, **how)  # type: ignore[arg-type]

    kl = means(rows, [row.mean_kl for row in rows], tokens)
    yield figure("max_mean_kl", "mean KL", mean(kl, gates.max_mean_kl))
    overlap = means(rows, [row.top10_overlap for row in rows], tokens)
    missing = mean(1 - overlap, 1 - gates.min_top10_overlap)
    yield figure("min_top10_overlap", "top-10 overlap", missing, shown=lambda m: 1 - m)
    pairs = [(row.candidate_nll, row.baseline_nll) for row in rows]
    nll = means(rows, [None if after is None or before is None else after - before for after, before in pairs], tokens)
    limit = math.log(gates.max_ppl_ratio)
    ratio = mean(nll, limit, -statistics.bets.OUTLIER * limit)
    yield figure("max_ppl_ratio", "PPL ratio", ratio, shown=lambda m: math.exp(min(m, 700.0)))


def means(rows: Sequence[SampleRow], values: Sequence[float | None], weights: Sequence[float]) -> "Array":
    """Return the weighted mean of every document, shape (documents,); NaN for documents with a missing value."""
    return statistics.bets.by_document(values, weights, [row.document for row in rows])


def distances(evidence: GateInput, gates: Gates) -> Iterator[Figure]:
    """Yield the figures on the mean distances of every workload.

    If other workloads have answers, a workload with only a few texts can fail but need not pass: it has too little data for a
    PASS.
    """
    for workload, rows in by_workload(evidence.rows).items():
        enough = statistics.bets.can_pass(len({row.document for row in rows}), gates.pass_alpha)
        beside = bool(evidence.judged) and not any(row.judged for row in rows)
        yield from measured(rows, gates, workload, must_pass=enough or not beside)


@dataclass(frozen=True)
class Ruined(Figure):
    """The share of requests whose mean KL is above OUTLIER times the limit."""

    ruined: int = 0
    requests: int = 0

    def test(self, fail_level: float, gates: Gates, *, last: bool) -> "Result":
        """Test the share. NONE_OF requests without a ruined one also PASS: showing 2.5 % statistically takes 150 documents."""
        result = super().test(fail_level, gates, last=last)
        none = not self.ruined and self.requests >= NONE_OF
        return replace(result, decision="PASS") if none and result.decision is None else result


def shows_none_ruined(documents: int, requests: int, gates: Gates) -> bool:
    """Return whether so many requests about so many documents PASS `max_ruined_share` if none of them is ruined."""
    limit, mean = gates.max_ruined_share, statistics.bets.Mean
    figure = Ruined("max_ruined_share", "all", mean(np.zeros(documents), limit, worst=1.0), limit, requests=requests)
    return figure.test(gates.alpha, gates, last=True).decision == "PASS"


def rare(evidence: GateInput, gates: Gates) -> Iterator[Figure]:
    """Yield the figures on the shares of ruined requests and of far tokens, over all workloads.

    Far tokens can only fail, because showing a share below 1/1000 would take thousands of documents.
    """
    rows, mean = evidence.rows, statistics.bets.Mean
    ruin = statistics.bets.OUTLIER * gates.max_mean_kl
    ruined = [float(row.mean_kl is None or not row.mean_kl <= ruin) for row in rows]
    count = int(sum(ruined))
    yield Ruined(
        "max_ruined_share",
        "all",
        mean(means(rows, ruined, [1.0] * len(rows)), gates.max_ruined_share, worst=1.0),
        gates.max_ruined_share,
        f"requests with a mean KL above {ruin:g}: {count} of {len(rows):,}, share by document",
        ruined=count,
        requests=len(rows),
    )
    far = [float(sum(kl > gates.max_p999_kl for kl in row.kl_tail)) for row in rows]
    tokens = [row.scored_tokens for row in rows]
    share = means(rows, [count / size for count, size in zip(far, tokens, strict=True)], tokens)
    label = f"tokens with a KL above {gates.max_p999_kl:g}: {sum(far):.0f} of {sum(tokens):,}, share by document"
    yield Figure("max_p999_kl", "all", mean(share, TAIL_SHARE, worst=1.0), TAIL_SHARE, label, must_pass=False)
