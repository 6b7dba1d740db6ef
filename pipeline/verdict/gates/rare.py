"""Rare events over all workloads, by exact bounds of counts: ruined requests, and tokens that are far away."""

from collections.abc import Iterator
from dataclasses import replace

from pipeline import statistics
from pipeline.verdict.gates import distances
from pipeline.verdict.gates.distances import compared
from pipeline.verdict.registry import Evidence, Line, gate
from pipeline.verdict.thresholds import Check, Margin, Positive

TAIL_SHARE = 0.001
"""Share of all tokens that may be above `max_p999_kl`."""
NONE_OF = 60
"""Requests of which none may be ruined where these are too few to show `max_ruined_share`."""
TOKEN_CORRELATION = 0.01
"""What the correlation of such tokens within a document is taken for before there are any; measured were 0.001 at most."""
EVENTS = {
    "max_ruined_share": Line("Ruined requests", "share whose mean KL is beyond three times its limit", per="all"),
    "max_p999_kl": Line("Far tokens", "share of the tokens with a KL above gates.max_p999_kl", per="all"),
}


class Limits(distances.Limits):
    max_ruined_share: Margin = 0.025
    """Share of the requests whose mean KL is above three times `max_mean_kl`, where there are any. Without any, 60 requests are
    enough for a PASS, and show that at most 5 % of independent ones are."""
    max_p999_kl: Positive = 1.0
    """99.9th percentile of the KL over all tokens. Sound caches of SmolLM2 have 0.5 at most, INT4 in groups of 32 has 2.9."""


@gate(Limits, EVENTS, rank=24, looks=True, tests=lambda *_: len(EVENTS))
def rare(evidence: Evidence, limits: Limits) -> Iterator[Check]:
    """Bound the share of ruined requests, and the share of tokens whose KL is above `max_p999_kl`.

    A PASS needs the first to be shown, or to be 0 of NONE_OF requests: 2.5 % would take 130 without any. The second takes
    thousands of tokens: where they do not show it, that is a WARNING.
    """
    rows, look, bets = evidence.rows, evidence.look, statistics.bets
    levels = look.fail_level(limits.alpha / evidence.together), look.pass_level(limits.pass_alpha)
    documents = [row.document for row in rows]
    ruin = bets.OUTLIER * limits.max_mean_kl
    ruined = [float(row.mean_kl is None or not row.mean_kl <= ruin) for row in rows]
    correlation = statistics.bounds.EVENT_CORRELATION
    requests = bets.share(ruined, [1.0] * len(rows), documents, limits.max_ruined_share, levels, correlation)
    if requests.decision is None and len(rows) >= NONE_OF and not any(ruined):
        requests = replace(requests, decision="PASS")
    label = f"requests with a mean KL above {ruin:g}: {sum(ruined):.0f} of {len(rows):,}, share"
    yield compared("max_ruined_share", "all", label, requests, limits.max_ruined_share)
    far = [float(sum(kl > limits.max_p999_kl for kl in row.kl_tail)) for row in rows]
    sizes = [row.scored_tokens for row in rows]
    tokens = bets.share(far, sizes, documents, TAIL_SHARE, levels, TOKEN_CORRELATION)
    label = f"tokens with a KL above {limits.max_p999_kl:g}: {sum(far):.0f} of {sum(sizes):,}, share"
    yield compared("max_p999_kl", "all", label, tokens, TAIL_SHARE, unclear="WARNING")
