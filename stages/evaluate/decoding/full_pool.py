"""Full-pool test: requests in a pool that holds a third of their pages, compared with the same requests with room.

The requests are samples, and mixtures that begin like one sample and end like another. All are sent together. In the small
pool, requests wait, are preempted in favor of older requests, and are computed again; vLLM also reuses cached prefixes. Answers
may differ from the answers with room by the engine's own noise. The noise is measured only if an answer differs, by sending the
requests in small groups to the large pool.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from stages.core.records import Progress, ServedRequest, no_progress
from stages.engines.interface import Engine, ForcedRequest, SupportsFullPool
from stages.evaluate.distances.distance import Array, kl_of_logits
from stages.evaluate.inputs.tokens import EncodedSample, judged_or_all
from stages.policies.policy import PAGE_TOKENS, page_count
from stages.verdict.report import FullPool

ROWS = 32
"""Number of compared tokens at the end of a request, where earlier errors have taken effect."""
ROUNDS = 2
SHARE = 3
"""Ratio of the requests' pages to the pages in the pool."""
GROUP = 4
"""Number of requests in a group that measures the noise floor."""
MIN_LIMIT_KL = 1e-5
FACTOR = 10.0
"""Maximum mean KL of a request, as a multiple of the largest mean KL of any request from noise alone."""

NamedRequest = tuple[str, ForcedRequest]
"""(name, request); the name has the ids of the samples that the request begins and ends with."""


def fill_pool_with_samples(engine: Engine, encoded: Sequence[EncodedSample], count: int, progress: Progress) -> FullPool | None:
    """Send requests made of samples to an engine with a small pool; None if `count` is 0, no requests without such a pool."""
    if not count:
        return None
    if not isinstance(engine, SupportsFullPool):
        return FullPool(requests_per_round=count)
    return fill_pool(engine, list(mixed_requests(encoded, count, engine.max_tokens)), progress)


def fill_pool(
    engine: Engine, requests_by_name: Sequence[NamedRequest], progress: Progress = no_progress, rounds: int = ROUNDS
) -> FullPool:
    """Compare requests in a pool that holds a third of their pages with the same requests in a pool with room for all.

    The requests are sent to the small pool `rounds` times, in different orders.
    """
    assert isinstance(engine, SupportsFullPool)
    count = len(requests_by_name)
    sizes = [page_count(len(tokens)) for _, (tokens, _) in requests_by_name]
    pages = max(sum(sizes) // SHARE, max(sizes) + 1)
    total = count * (rounds + 2)

    def served(done: int) -> None:
        progress("full pool [requests]", done, total)

    served(0)
    requests = [request for _, request in requests_by_name]
    (uncrowded,) = engine.serve_rounds([requests], ROWS)
    served(count)
    orders = [np.random.default_rng(number).permutation(count).tolist() for number in range(rounds)]
    crowded = engine.serve_rounds([[requests[i] for i in order] for order in orders], ROWS, pages)
    served((1 + rounds) * count)
    changed: list[tuple[float, str]] = []
    for number, (order, answers) in enumerate(zip(orders, crowded, strict=True), start=1):
        for i, answer in zip(order, answers, strict=True):
            kls = _distances(uncrowded[i], answer)
            if not (kl := float(np.mean(kls))) <= MIN_LIMIT_KL:
                name = f"{requests_by_name[i][0]} (round {number})"
                changed.append((kl, _deviation(name, requests_by_name[i][1], uncrowded[i], answer, kls)))
    limit = max(MIN_LIMIT_KL, FACTOR * _noise(engine, requests, uncrowded)) if changed else MIN_LIMIT_KL
    served(total)
    deviations = sorted((change for change in changed if change[0] > limit), key=lambda deviation: -deviation[0])
    return FullPool(
        requests_per_round=count,
        requests=rounds * count,
        pages=pages,
        wanted_pages=sum(sizes),
        preempted=sum(answer.preempted for answers in crowded for answer in answers),
        reused=sum(answer.reused for answers in crowded for answer in answers),
        limit_kl=limit,
        deviations=tuple(text for _, text in deviations),
    )


def _noise(engine: Engine, requests: Sequence[ForcedRequest], uncrowded: Sequence[ServedRequest]) -> float:
    """Return the largest mean KL of a request that is sent again in a small group to the large pool; 0 if any is not finite."""
    assert isinstance(engine, SupportsFullPool)
    if engine.reads_itself:  # such an engine recomputes a preempted request as one prompt
        requests = [(tokens, max(first, len(tokens) - ROWS)) for tokens, first in requests]
    groups = -(-len(requests) // GROUP)
    rounds = engine.serve_rounds([requests[i::groups] for i in range(groups)], ROWS)
    pairs = zip(chain.from_iterable(uncrowded[i::groups] for i in range(groups)), chain.from_iterable(rounds), strict=True)
    noise = [float(np.mean(_distances(*pair))) for pair in pairs]
    return max(noise) if np.isfinite(noise).all() else 0.0


def mixed_requests(encoded: Sequence[EncodedSample], count: int, max_tokens: int | None) -> Iterator[NamedRequest]:
    """Yield `count` requests: first the chosen samples, then mixtures that begin like one sample and end like another.

    The candidates are all samples of more than three pages, or the longest quarter of the samples if that is more. The shortest
    candidates are chosen, at most half of `count`. A mixture shares its first page with another prompt. A request decodes at
    least a page of tokens, so that it needs a new page while it is decoded.
    """
    judged = sorted(judged_or_all(encoded), key=lambda item: len(item.prompt))
    short = sum(len(item.prompt) <= 3 * PAGE_TOKENS for item in judged)
    chosen = judged[min(short, len(judged) - max(1, len(judged) // 4)) :][: count // 2]
    for number in range(count):
        begins, ends = number % len(chosen), (number % len(chosen) + number // len(chosen)) % len(chosen)
        head, tail = chosen[begins], chosen[ends]
        end = (*tail.prompt[len(tail.prompt) // 2 :], *tail.reference[:-1])
        tokens = [*head.prompt[: len(head.prompt) // 2], *end][: None if max_tokens is None else max_tokens - 1]
        first = max(1, min(len(tokens) - len(tail.reference), len(tokens) - PAGE_TOKENS))
        name = head.sample.id if head is tail else f"{head.sample.id}, continued as {tail.sample.id}"
        yield name, (tokens, first)


def _distances(uncrowded: ServedRequest, crowded: ServedRequest) -> Array:
    """Return the KL per compared token; infinite if a logit is not finite."""
    rows = min(len(uncrowded.logits), len(crowded.logits))
    return kl_of_logits(uncrowded.logits[-rows:], crowded.logits[-rows:])


def _deviation(name: str, request: ForcedRequest, uncrowded: ServedRequest, crowded: ServedRequest, kls: Array) -> str:
    """Describe a request whose logits changed, with the counters that the engine exposes; `kls`: KL per compared token."""
    kl = float(np.mean(kls))
    off = f"KL {kl:.1e} from itself with room" if np.isfinite(kl) else "logits that are not finite"
    position = len(request[0]) - len(kls) + int(np.argmax(kls))
    changed = int((uncrowded.logits[-len(kls) :].argmax(-1) != crowded.logits[-len(kls) :].argmax(-1)).sum())
    return (
        f"{name}: {off}, most at position {position}, {changed} of its tokens changed; preempted {crowded.preempted} times, "
        f"reused {crowded.reused} tokens, held pages {', '.join(map(str, crowded.pages)) or 'unknown'}"
    )
