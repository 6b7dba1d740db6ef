"""Isolation test: a crowd of requests in a continuously refilled batch must not read data that other requests wrote.

Two of three requests are watched, the others are unrelated. The order is random. The crowd runs twice. In the second run, the
watched requests are the same, in the same order, and the unrelated requests have the same lengths but different tokens. No
watched logit may change: even a small change must come from a page, row or buffer of another request, live or released. In
the second run, idle sequences hold one page each, so that the crowd gets page numbers above 255, and above those of the
largest batch. If watched logits change, the first run is repeated unchanged, to measure the noise of a nondeterministic engine.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from stages.engines.interface import SupportsFork, SupportsRequests
from stages.evaluate.conformance.deviations import PASS_TOKENS
from stages.evaluate.conformance.operations import StressTest
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.evaluate.decoding.full_pool import ROUNDS, fill_pool
from stages.evaluate.decoding.system import STATM, resident_bytes
from stages.policies.policy import PAGE_TOKENS, page_count

SHORT = ((1, 3, 17), (2, 8, 9), (9, 15, 14), (16, 30, 10), (31, 50, 8), (51, 63, 6), (64, 70, 4))
"""(minimum prompt tokens, maximum prompt tokens, mean answer tokens) of short requests."""
LONG = ((130, 190), (370, 430), (220, 300))
"""(minimum, maximum) prompt tokens of long requests, a fifth of all. They free more than two pages, which others reuse."""
LONG_STEPS = 24
"""Answer tokens of long requests: enough for several long requests to be live at any time."""
ASLEEP_PAGES = 256
"""Minimum pages that idle and batched sequences hold together; raised to a full batch of the longest sequences."""
ASLEEP_BYTES = 64 << 20
"""Maximum bytes of the idle sequences' pages. Large pages allow fewer idle sequences: none if ASLEEP_PAGES pages do not fit."""
WATCHED_LOGITS = 512
"""Approximate number of stored logits per row. A sample suffices, because reading a wrong page changes all logits."""
NOISE = 4.0
"""Maximum change of a logit, as a multiple of the change that an unchanged repetition shows."""

MIN_REPETITIONS = 4
"""Minimum number of rounds of the wear test. Each round sends a pair of requests; two pairs alternate."""
LEAK_BYTES = 512 << 10
"""Minimum growth in bytes that counts as a leak. The last three quarters of the run must each show it."""

MIN_POOL_REQUESTS, POOL_REQUESTS, POOL_STEPS = 5, 8, (8, 18)
"""Requests in the full pool: the minimum, and the number in a test of full size. (minimum, maximum) tokens that each decodes,
across a page boundary."""

LogitSample = npt.NDArray[np.float32]


def crowd(test: StressTest) -> None:
    kinds = _kinds(test)
    first = _serve(test, kinds, 1, compared=True)
    sleepers = _start_sleepers(test)
    try:
        other = _serve(test, kinds, 2)
    finally:
        test.engine.release(sleepers)
    changed = _difference(first, other)
    if changed.max(initial=0.0) == 0.0:
        return
    largest = max((float(np.abs(marks).max()) for marks in first), default=0.0)
    repeated = _difference(first, _serve(test, kinds, 1))
    # Noise changes most tokens. If the repetition differs in only a few tokens, these are rare faults instead of noise.
    noise = float(repeated.max()) if np.median(repeated) > 0 else 0.0
    allowed = NOISE * max(noise, test.engine.logit_step * largest)
    influenced = ~(changed <= allowed)
    if influenced.any():
        test.failures.append(
            f"isolation: {influenced.sum()} of {len(changed)} tokens of a crowd depend on other requests: logits change by up "
            f"to {changed.max():.2g} if only other requests' tokens change (by {noise:.2g} in an unchanged repetition)"
        )


def wear(test: StressTest) -> None:
    """Repeat short requests many times, and every second time fork one and extend the fork by a turn.

    The requests' logits must not change, and the process must not grow.
    Two pairs of requests alternate, so that a page holds other tokens each time. One request per pair crosses a page border.
    """
    count = max(MIN_REPETITIONS, test.scaled(2 * test.config.requests))
    if isinstance(test.engine, SupportsRequests) or test.max_tokens < 2 * PAGE_TOKENS:
        return
    steps = test.config.wear_steps
    lengths = test.randint(PAGE_TOKENS - steps + 1, PAGE_TOKENS - 1), test.randint(2, 9)
    name = "a request that is repeated many times"
    pairs = [[test.sequence(name, length, steps) for length in lengths[: test.largest]] for _ in range(2)]
    first, changed, resident = list[list[LogitSample]](), list[float](), list[int]()
    for number in range(count):
        again = [ForcedSequence(name, row.prompt, list(row.ahead), watched=number < 2) for row in pairs[number % 2]]
        test.prefill(*again)
        if number % 2 and isinstance(test.engine, SupportsFork) and test.largest > len(again):
            fork = test.engine.fork(again[0].handle)
            test.engine.extend(fork, again[1].prompt)
            test.engine.release([fork])
        test.decode(*again, steps=steps)
        test.release(*again)
        marks = [mark for sequence in again for mark in _sample_logits(sequence)]
        first += [marks] * (number < 2)
        changed += _difference(first[number % 2], marks).tolist()
        if STATM.exists() and 4 * (number + 1) // count > len(resident):
            resident.append(resident_bytes())
    largest = max(float(np.abs(mark).max()) for marks in first for mark in marks)
    noise = float(np.median(changed[2 * len(first[0]) :]))  # the first run of each pair was compared with itself
    allowed = max(NOISE * noise, test.engine.logit_step * largest)
    wrong = ~(np.array(changed) <= allowed)
    if wrong.any():
        where = int(wrong.argmax()) // len(first[0]) + 1
        test.failures.append(
            f"wear: {wrong.sum()} tokens of short requests, repeated {count} times, differ from the first time by up to "
            f"{max(changed):.2g} ({allowed:.2g} allowed), first in repetition {where}"
        )
    grown = int(np.diff(resident).min(initial=1 << 62)) if len(resident) == 4 else 0  # the first quarter may allocate
    if grown >= LEAK_BYTES:
        test.failures.append(
            f"wear: the process grows by {4 * grown / count / 1024:.1f} KiB with each of {count} repetitions of short requests"
        )


def full_pool(test: StressTest) -> None:
    """Send requests, half with a common prefix, to a pool with a third of their pages. They wait, are preempted and resume.

    The scenario skips engines whose full pool is tested with samples by default.
    """
    if test.engine.full_pool_requests or test.max_tokens < 5 * PAGE_TOKENS:
        return
    page, (least, most) = test.draw(PAGE_TOKENS), POOL_STEPS
    named = []
    for number in range(max(MIN_POOL_REQUESTS, test.scaled(POOL_REQUESTS))):
        steps = test.randint(least, least + test.scaled(most - least))
        length = (1 + round(test.share * (number % 3))) * PAGE_TOKENS + test.randint(PAGE_TOKENS - steps // 2, PAGE_TOKENS - 1)
        begin = page if number % 2 else test.draw(PAGE_TOKENS)
        tokens = [*begin, *test.draw(length - PAGE_TOKENS + steps)]
        named.append((f"request {number} of {length} and {steps} tokens", (tokens, length)))
    result = fill_pool(test.engine, named, rounds=test.scaled(ROUNDS))
    test.counts["requests"] += result.requests
    test.counts["preempted"] += result.preempted
    test.failures += [f"full pool: {deviation}" for deviation in result.deviations[:3]]


def _start_sleepers(test: StressTest) -> list[int]:
    """Start idle sequences of one page each, which are never decoded; none if the engine cannot hold ASLEEP_PAGES of them."""
    engine = test.engine
    fitting = ASLEEP_BYTES // engine.policy.pool_bytes(engine.shape, 1)
    if engine.max_sequences is not None or not isinstance(engine, SupportsFork) or fitting < ASLEEP_PAGES:
        return []
    pages = min(fitting, max(ASLEEP_PAGES, test.largest * page_count(test.max_tokens)))
    first = engine.prefill([test.draw(1)])[0]
    return first + [engine.fork(first[0]) for _ in range(pages - test.largest - 1)]


def _kinds(test: StressTest) -> list[ForcedSequence]:
    """Return the watched requests, which are sent repeatedly."""
    most = test.max_tokens
    shapes = [
        (test.randint(low, high), test.randint(steps // 2, 3 * steps // 2))
        for low, high, steps in SHORT
        if high + 2 * steps <= most
    ]
    # Use three lengths for long requests, limited by the model and the engine. One of them ends with a full page.
    drawn = [test.randint(*span) for span in LONG]
    full = test.randint(0, len(LONG) - 1)
    drawn[full] = page_count(LONG[full][0] + LONG_STEPS) * PAGE_TOKENS - LONG_STEPS
    shapes += [(max(1, min(length, most - LONG_STEPS - number)), LONG_STEPS) for number, length in enumerate(drawn)]
    return [test.sequence(f"request of {length} and {steps} tokens", length, steps) for length, steps in shapes]


def _arrivals(test: StressTest, kinds: Sequence[ForcedSequence], unrelated: int) -> Iterator[ForcedSequence]:
    """Yield the requests in order of arrival, with equal lengths in all runs. Unrelated requests have no name."""
    order, tokens = np.random.default_rng([test.seed, 0]), np.random.default_rng([test.seed, unrelated])
    long = len(kinds) - len(LONG)
    for is_long in order.permutation(np.arange(test.config.requests) % 5 == 4):  # random: a fault may be periodic
        kind = kinds[int(order.integers(long, len(kinds)) if is_long else order.integers(long))]
        same_prompt = order.integers(4) == 0
        if order.integers(3):
            yield ForcedSequence(kind.name, kind.prompt, list(kind.ahead))
            continue
        drawn: list[int] = tokens.integers(0, test.engine.vocab_size, len(kind.prompt) + len(kind.ahead)).tolist()
        prompt = kind.prompt if same_prompt else drawn[: len(kind.prompt)]  # some begin like a watched request
        yield ForcedSequence("", prompt, drawn[len(kind.prompt) :], watched=False)


def _serve(test: StressTest, kinds: Sequence[ForcedSequence], unrelated: int, *, compared: bool = False) -> list[LogitSample]:
    waiting = deque(_arrivals(test, kinds, unrelated))
    places = np.random.default_rng([test.seed, 0, 1])
    marks: list[LogitSample] = []
    live: list[ForcedSequence] = []
    while waiting or live:
        arrived = [waiting.popleft() for _ in range(min(test.largest - len(live), len(waiting)))]
        for sequence in arrived:
            sequence.watched &= compared
            sequence.name = sequence.name and f"{sequence.name}, quarter {4 - 4 * len(waiting) // (test.config.requests + 1)}"
        if isinstance(test.engine, SupportsRequests):
            test.serve(arrived)
            live, leaving = [], arrived
        else:
            if arrived:
                test.prefill(*arrived)
                for sequence in arrived:  # between other rows, as in engines that reuse the row of a finished request
                    live.insert(int(places.integers(len(live) + 1)), sequence)
            test.decode(*live)
            leaving = [sequence for sequence in live if not sequence.ahead]
            live = [sequence for sequence in live if sequence.ahead]
            test.release(*leaving)
        marks += [mark for sequence in leaving if sequence.name for mark in _sample_logits(sequence)]
        test.compare(PASS_TOKENS)
    return marks


def _sample_logits(sequence: ForcedSequence) -> list[LogitSample]:
    return [row[:: max(1, len(row) // WATCHED_LOGITS)].copy() for row in sequence.logits]


def _difference(first: Sequence[LogitSample], other: Sequence[LogitSample]) -> npt.NDArray[np.float64]:
    """Return the largest absolute difference of logits by token; a NaN in a single run counts as infinite."""
    differences = [
        0.0 if np.array_equal(a, b, equal_nan=True) else float(np.nan_to_num(np.abs(a - b), nan=np.inf).max())
        for a, b in zip(first, other, strict=True)
    ]
    return np.array(differences)
