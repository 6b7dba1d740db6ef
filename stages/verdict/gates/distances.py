"""The gates on distances from the baseline's next-token distributions, and the must-fail control, which must fail them."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from stages.verdict.bets import OUTLIER, Array, Mean
from stages.verdict.figures import Figure, GateInput, by_workload, means
from stages.verdict.report import SampleRow
from stages.verdict.verdict import ALL, ALPHA, FAR_KL, MIN_TOP10_OVERLAP, Check, Gate, Thresholds
from stages.workloads.config import CONTROL_FACTOR

TAIL_SHARE = 0.001


def distances(
    rows: Sequence[SampleRow], thresholds: Thresholds, where: str = "", *, must_pass: bool = True
) -> Iterator[Figure]:
    """Yield the figures on the mean KL and the top-10 overlap of some samples."""
    tokens = [row.scored_tokens for row in rows]
    limit = thresholds.max_mean_kl
    kl = Mean(means(rows, [row.mean_kl for row in rows], tokens), limit)
    yield Figure(gate=Gate.MEAN_KL, where=where, mean=kl, threshold=limit, label="mean KL", must_pass=must_pass)
    missing = Mean(1 - means(rows, [row.top10_overlap for row in rows], tokens), 1 - MIN_TOP10_OVERLAP)
    yield Figure(
        gate=Gate.TOP10_OVERLAP,
        where=where,
        mean=missing,
        threshold=MIN_TOP10_OVERLAP,
        label="top-10 overlap",
        to_shown=lambda share: 1 - share,
        must_pass=must_pass,
    )


def mean_distances(evidence: GateInput, thresholds: Thresholds) -> Iterator[Figure]:
    """Yield the figures on the mean distances of every workload.

    A workload of texts without answers need not pass if it has too few documents for a PASS and other workloads have answers.
    It can still fail.
    """
    for workload, rows in by_workload(evidence.rows).items():
        can_pass = Mean(np.zeros(len({row.document for row in rows})), 1.0).passes(thresholds.pass_alpha)
        only_others_judged = bool(evidence.judged) and not any(row.judged for row in rows)
        yield from distances(rows, thresholds, workload, must_pass=bool(can_pass) or not only_others_judged)


def shows_none_ruined(documents: int, requests: int, thresholds: Thresholds) -> bool:
    """Return whether `max_ruined_share` passes for this number of documents and requests if no request is ruined."""
    figure = _ruined_share(np.zeros(documents), thresholds, sound_requests=requests)
    return figure.test(ALPHA, thresholds.pass_alpha, last=True).decision == "PASS"


def _ruined_share(values: Array, thresholds: Thresholds, *, sound_requests: int, label: str = "") -> Figure:
    limit = thresholds.max_ruined_share
    mean = Mean(values, limit, worst=1.0)
    return Figure(gate=Gate.RUINED, where=ALL, mean=mean, threshold=limit, label=label, sound_requests=sound_requests)


def outlier_shares(evidence: GateInput, thresholds: Thresholds) -> Iterator[Figure]:
    """Yield the figures on the share of ruined requests and the share of tokens above FAR_KL, over all workloads.

    The share of such tokens can only fail, because showing a share below 1/1000 would take thousands of documents.
    """
    rows = evidence.rows
    ruin = OUTLIER * thresholds.max_mean_kl
    ruined = [float(row.mean_kl is None or not row.mean_kl <= ruin) for row in rows]
    count = int(sum(ruined))
    label = f"requests with a mean KL above {ruin:g}: {count} of {len(rows):,}, share by document"
    sound_requests = 0 if count else len(rows)
    yield _ruined_share(means(rows, ruined), thresholds, sound_requests=sound_requests, label=label)
    far = [row.far_tokens for row in rows]
    tokens = [row.scored_tokens for row in rows]
    label = f"tokens with a KL above {FAR_KL:g}: {sum(far):,} of {sum(tokens):,}, share by document"
    shares = means(rows, [hits / size for hits, size in zip(far, tokens, strict=True)], tokens)
    mean = Mean(shares, TAIL_SHARE, worst=1.0)
    yield Figure(gate=Gate.FAR_TOKENS, where=ALL, mean=mean, threshold=TAIL_SHARE, label=label, must_pass=False)


def must_fail_control(evidence: GateInput, thresholds: Thresholds) -> Iterator[Check]:
    """Yield a PASS if a gate on distances fails the engine with corrupted key scales; else, or if it did not run, a FAIL."""
    rows = evidence.report.tests.control
    tested = [figure.mean for figure in distances(rows, thresholds)] if rows else []
    kl = float(tested[0].values.mean()) if tested else math.nan
    noticed = any(mean.fails(ALPHA) for mean in tested)
    outcome = "; it did not run"
    if rows:
        outcome = ", noticed" if noticed else ", and no gate noticed: the evaluation does not see the cache"
    yield Check.of(
        Gate.MUST_FAIL_CONTROL,
        "must-fail control",
        status="PASS" if noticed else "FAIL",
        text=f"with key scales x {CONTROL_FACTOR:g} the mean KL is {kl:.3g}{outcome}",
        value=kl,
        threshold=thresholds.max_mean_kl,
    )
