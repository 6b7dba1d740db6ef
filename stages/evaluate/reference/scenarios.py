"""The scenarios of the stress test: what sequences do on the engine, one function each, and the table that lists them.

Tokens are drawn from the seed of the run, and so are the lengths and the order that no border of a page, tile or policy fixes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS
from stages.evaluate.decoding.pressure import press
from stages.evaluate.reference.crowd import crowd, wear
from stages.evaluate.reference.sequence import StressSequence
from stages.evaluate.reference.stress import StressTest

STEPS = 4
"""Decode steps of a sequence, where nothing else says how many."""

LONG_ANSWER = PAGE_TOKENS + 8
"""Tokens of one of the free answers: a page begins in it."""

LEAVING = 32
"""Steps within which the rows of the ragged batch leave one after the other: batches of every size up to that."""

FORKED_AT = (PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1)
"""Tokens at which sequences are forked: nearly all of a page is copied, nothing, nearly nothing of one."""

TURNS = ((60, 1, 5), (61, 9, 2), (20, 41, 60), (57, 62, 7))
"""Tokens of a prompt and of two later turns, three decoded ones after each: borders of pages, and beside them."""

SHARING = 12
"""Rows on one prefix."""

LONGEST_ANSWER = 200
"""Tokens of the longest free answer."""

WAITING = 80
"""Prompts that are asked in one call."""

PRESSED, PRESSED_STEPS = 8, 24
"""Requests in a full pool, and tokens that each decodes, over a border of a page."""


@dataclass(frozen=True)
class Scenario:
    """What is run, and what an engine has to be able to for it."""

    run: Callable[[StressTest], None]
    needs: tuple[Callable[..., object], ...] = ()

    @property
    def name(self) -> str:
        return self.run.__name__


def batch(test: StressTest) -> None:
    """A ragged batch of the largest size, two of whose rows have the claimed length, answered freely and then forced.

    One row after the other leaves, so that the batch has every size; those that decode far are the last. The longest row is
    prefilled once: no free answer to it is asked.
    """
    sequences = ragged(test)
    more = [test.sequence("a prompt that joins", 1 + 7 * i % 41, 1 + i % 3) for i in range(test.largest // 2 + 1)]
    asked = [*sequences[1:], *more]
    limits = [min(2, len(sequence.ahead)) for sequence in sequences[1:]] + [len(sequence.ahead) for sequence in more]
    limits[len(sequences) - 2] = min(len(sequences[-1].ahead), LONG_ANSWER)
    for sequence, answer in zip(asked, test.ask(asked, limits), strict=True):
        sequence.ahead[: len(answer)] = answer
    test.serve(sequences)


def ragged(test: StressTest) -> list[StressSequence]:
    """Return the rows of the ragged batch: long ones first and last but one, short ones between them."""
    size, most, config = test.largest, test.max_tokens, test.config
    steps = 1 + min(config.offset_steps, most // 2)  # one alone
    far = min(config.decode_steps, most - 32)
    claimed = min(test.claimed, most - STEPS)
    chosen = [
        test.sequence(f"{most:,} tokens", most - steps, steps),
        test.sequence("9 tokens and far", 9, far),
        test.sequence("a row of the claimed length", claimed, STEPS),
        test.sequence("1 token and far", 1, far),
    ][:size]
    lengths = offsets_and_borders(test, size - len(chosen), most - LEAVING - 2)
    rest = [
        test.sequence("a ragged row", length, 2 + i * min(LEAVING, len(lengths)) // len(lengths))
        for i, length in enumerate(lengths)
    ]
    if size < 4:
        return [*chosen[:1], *chosen[2:], *chosen[1:2]]
    longest, answered, long, alone = chosen
    half = len(rest) // 2
    return [longest, *rest[:half], alone, *rest[half:], long, answered]


def offsets_and_borders(test: StressTest, size: int, most: int) -> list[int]:
    """Return the lengths of a batch's prompts: pairs of equal ones at drawn offsets of a page, then the policy's borders."""
    policy = test.engine.policy
    borders = {policy.sink_tokens, policy.recent_tokens, policy.exact_tokens, PAGE_TOKENS, 2 * PAGE_TOKENS}
    if policy.window is not None:
        borders |= {policy.window.tokens, policy.window.tokens + PAGE_TOKENS}
    if policy.eviction is not None:
        kept = policy.eviction.sink_tokens + policy.eviction.heavy_tokens + policy.eviction.window_tokens
        borders |= {kept, kept + PAGE_TOKENS, kept + 2 * PAGE_TOKENS}
    lengths = sorted({border - 1 for border in borders if 1 < border - 1 <= most})[: size // 2]
    rest = size - len(lengths)
    drawn = test.rng.permutation(np.arange(1, min(most, PAGE_TOKENS) + 1))
    return [*sorted(int(drawn[i // 2 % len(drawn)]) for i in range(rest)), *lengths]


def equal(test: StressTest) -> None:
    """Equal prompts that share a partial page and then part, in the page and over its border; others share a second page."""
    prompt = test.draw(PAGE_TOKENS - STEPS)
    role = f"equal prompts of {len(prompt)} tokens that part"
    test.serve([test.sequence(role, prompt, 2 * STEPS) for _ in range(2)])
    page, role = test.draw(PAGE_TOKENS), "prompts that differ before an equal page"
    if test.max_tokens >= 2 * PAGE_TOKENS + STEPS:
        test.serve([test.sequence(role, [*test.draw(PAGE_TOKENS), *page], STEPS) for _ in range(2)])


def turns(test: StressTest) -> None:
    """Turns: prompt, decode, later chunk, decode, later chunk, decode, all together; and of every second one after a fork."""
    drawn: tuple[int, int, int] = tuple(test.rng.integers(1, PAGE_TOKENS + 1, 3).tolist())
    fitting = [turn for turn in (*TURNS, drawn) if sum(turn) + 9 <= test.max_tokens]
    forks = test.engine.can(Engine.fork) and test.largest > 1
    for begin in range(0, len(fitting), each := max(1, test.largest // (1 + forks))):
        together = fitting[begin : begin + each]
        sequences = [test.sequence(f"turns of {', '.join(map(str, turn))} tokens", turn[0]) for turn in together]
        chunks = [turn[1:] for turn in together]
        test.prefill(*sequences)
        for number in range(2):
            test.decode(*sequences, steps=3)
            if number == 1 and forks:
                sequences += [test.fork(sequence, f"{sequence.role}, forked before the last") for sequence in sequences[::2]]
                chunks += chunks[::2]
            for sequence, chunk in zip(sequences, chunks, strict=True):
                test.extend(sequence, chunk[number])
        test.decode(*sequences, steps=3)
        test.release(*sequences)


def fork(test: StressTest) -> None:
    """Forks: both branches go on, the origin goes, its pages are used again, and a fork is forked, and its fork."""
    for length in FORKED_AT:
        if length + 16 > test.max_tokens or test.largest < 3:
            return
        origin = test.sequence(f"origin forked at {length} tokens", length, STEPS)
        test.prefill(origin)
        branch = test.fork(origin, f"fork at {length} tokens", 2 * STEPS)
        test.decode(branch, origin, steps=STEPS)
        test.release(origin)
        other = test.sequence("a new sequence on an origin's pages", length, STEPS)
        test.prefill(other)
        rows = [test.fork(branch, f"fork of a fork at {length} tokens"), branch, other]
        if test.largest > 3:
            rows = [test.fork(rows[0], f"fork of a fork of a fork at {length} tokens"), *rows]
        test.decode(*rows, steps=STEPS)
        test.release(*rows)


def evicted_fork(test: StressTest) -> None:
    """An origin goes on alone until a page leaves it, a new sequence comes, and the branch still reads that page."""
    policy, shape = test.engine.policy, test.engine.shape
    first = next((n for n in range(PAGE_TOKENS, test.max_tokens - 16) if policy.evicted_pages(n, shape)), None)
    if first is None or test.largest < 3:
        return
    length = first - STEPS // 2  # half of the branch's steps come before it loses the page too
    origin = test.sequence(f"origin that evicts after {length} tokens", length, STEPS)
    test.prefill(origin)
    branch = test.fork(origin, f"fork at {length} tokens of an origin that evicted", STEPS)
    test.decode(origin, steps=STEPS)
    other = test.sequence("a new sequence on evicted pages", 2 * PAGE_TOKENS, STEPS)
    test.prefill(other)
    test.decode(branch, other, steps=STEPS)
    test.release(origin, branch, other)


def prefix(test: StressTest) -> None:
    """Prompts that begin alike, one after the other, on an engine that keeps such beginnings for later prompts."""
    chunk = test.engine.prefill_chunk
    if not test.engine.keeps_prefixes or chunk + PAGE_TOKENS > test.max_tokens:
        return
    beginning = test.draw(2 * chunk if 2 * chunk + PAGE_TOKENS <= test.max_tokens else chunk)
    alike = [
        (f"prompt {number} with one beginning", [*beginning, *test.draw(more)]) for number, more in enumerate((5, 5, 40), 1)
    ]
    others = [("a prompt that parts from it and ends alike", [*test.draw(chunk), *beginning[chunk:], *test.draw(5)])]
    if 2 * chunk + STEPS <= test.max_tokens:
        others.append(("a kept beginning and a whole chunk", [*beginning[:chunk], *test.draw(chunk)]))
    for number, (role, prompt) in enumerate([*alike, *others]):
        sequence = test.sequence(role, prompt, STEPS)
        test.prefill(sequence)
        test.prefixes += 0 < number < len(alike)
        test.finish([sequence])


def talk(test: StressTest) -> None:
    """A long conversation: later turns of up to two pages, after an eviction if the policy has one; its fork goes on, too."""
    policy, all_kept = test.engine.policy, test.max_tokens
    window = all_kept if policy.window is None else policy.window.tokens
    # Tokens of a longer turn leave the cache before anything can look at them.
    longest = min(window, policy.latest_tokens(test.engine.shape) or all_kept)
    lengths = [min(longest, test.length(*span)) for span in ((130, 190), (63, 120), (1, 9), (20, 62), (63, 66), (70, 130))]
    first = min(1000 if policy.eviction is not None else 700, test.max_tokens - sum(lengths) - 40)
    if first < 1:
        return
    origin = test.sequence("a long conversation", first)
    test.prefill(origin)
    for length in lengths[:-1]:
        test.decode(origin, steps=3)
        test.extend(origin, length)
    test.decode(origin, steps=3)
    rows = [origin]
    if test.engine.can(Engine.fork) and test.largest > 1:
        rows.append(test.fork(origin, "a fork of a long conversation"))
        test.decode(*rows[::-1], steps=STEPS)
    test.extend(rows[-1], lengths[-1])
    test.decode(*rows, steps=STEPS)
    test.release(*rows)


def shared(test: StressTest) -> None:
    """Many rows on one prefix that ends in a page; most leave, and new sequences take their pages."""
    count, length = min(SHARING, test.largest - 1), min(test.length(130, 250), test.max_tokens - 4 * STEPS)
    if count < 3:
        return
    origin = test.sequence(f"a prefix of {length} tokens", length)
    test.prefill(origin)
    rows = [test.fork(origin, f"row {number} on one prefix") for number in range(count)]
    test.decode(*rows, steps=STEPS)
    kept = rows[2 * count // 3 :]
    test.release(origin, *rows[: 2 * count // 3])
    fresh = [test.sequence("a new sequence beside them", min(n, length)) for n in (test.length(65, 140), test.length(33, 90))]
    test.prefill(*fresh)
    test.decode(*kept, *fresh, steps=STEPS + 2)
    test.release(*kept, *fresh)


def schedule(test: StressTest) -> None:
    """Rows change places, sit out steps, and sleep long; one is cancelled, one ends with a full page."""
    if test.engine.can(Engine.forced_together) or test.largest < 4 or test.max_tokens < 4 * PAGE_TOKENS:
        return
    rows = [test.sequence(f"row {number}", test.length(1, 2 * PAGE_TOKENS)) for number in range(min(4, test.largest - 2))]
    test.prefill(*rows)
    test.decode(*rows, steps=2)
    cancelled = test.sequence("cancelled after its prompt", test.length(1, 90))
    test.prefill(cancelled)
    test.release(cancelled)
    full, beside = (test.sequence(role, PAGE_TOKENS - STEPS) for role in ("ends with a full page", "beside a full page"))
    test.prefill(full, beside)
    test.decode(full, beside, steps=STEPS)
    test.release(full)
    late = test.sequence("begins on a full page", test.length(70, 150))
    test.prefill(late)
    test.decode(late, beside, steps=STEPS + 2)
    test.release(late, beside)
    for _ in range(6):
        order = test.rng.permutation(len(rows))[: test.length(1, len(rows))]
        test.decode(*(rows[place] for place in order))
    test.decode(*rows[:2], steps=PAGE_TOKENS - 20)
    test.decode(*rows[::-1], steps=3)
    test.release(*rows)


def lengths(test: StressTest) -> None:
    """Prompts of whole tiles and chunks, caches that cross them, drawn ones up to the longest, and many tokens in one step."""
    chunk = min(test.engine.prefill_chunk, test.max_tokens - 8)
    drawn = [test.length(430, 980) for _ in range(2)]
    fitting = [length for length in (256, 512, chunk, 510, *drawn) if length + 8 <= test.max_tokens]
    rows = [test.sequence(f"a prompt of {length} tokens", length, STEPS + 2) for length in fitting[: test.largest]]
    if rows and test.engine.can(Engine.forced_together):
        test.serve(rows)
    if not rows or test.engine.can(Engine.forced_together):
        return
    test.prefill(*rows)
    test.decode(*rows, steps=STEPS)
    others: list[StressSequence] = []
    if test.engine.can(Engine.fork):  # sequences of the longest prompt, which only make the step larger
        longest = max(rows, key=lambda sequence: len(sequence.tokens))
        others = [test.fork(longest, "") for _ in range(min(9, test.largest - len(rows)))]
    for other in others:
        other.watched = False
    test.decode(*others, *rows, steps=2)
    test.release(*others, *rows)


def answers(test: StressTest) -> None:
    """Free answers: a long one, many that wait, equal prompts with other limits, equal first pages, and two stop tokens."""
    most = min(LONGEST_ANSWER, test.max_tokens - 50)
    if most < PAGE_TOKENS:
        return
    long, again = test.sequence("a long answer", 40), test.sequence("the same prompt again", 50)
    (said,) = test.ask([long], [most])
    for limit in (4, 10):
        (short,) = test.ask([again], [limit])
    waiting = [test.sequence("one of many that wait", test.length(3, 12)) for _ in range(WAITING)]
    test.ask(waiting, [3] * len(waiting), at_once=max(1, test.largest // 2))
    page = test.draw(min(PAGE_TOKENS, most))
    alike = [test.sequence("prompts with one first page", [*page, *test.draw(9)]) for _ in range(3)]
    test.ask(alike, [6] * len(alike))
    other = next(token for token in range(test.engine.vocab_size) if token not in {*short, *said})
    for sequence, stop, limit in ((again, short[:1], 10), (long, said[-1:], most)):
        if stop:
            test.ask([sequence], [limit], [other, *stop])


def full_pool(test: StressTest) -> None:
    """Requests in a pool that holds a third of them, half of which begin alike: they wait, give way, and come again.

    An engine that is asked with samples by default is not asked here.
    """
    if test.engine.pressed_requests or test.max_tokens < 5 * PAGE_TOKENS:
        return
    page, named = test.draw(PAGE_TOKENS), []
    for number in range(PRESSED):
        length = (1 + number % 3) * PAGE_TOKENS + test.length(PAGE_TOKENS - PRESSED_STEPS + 6, PAGE_TOKENS - 1)
        begin = page if number % 2 else test.draw(PAGE_TOKENS)
        tokens = [*begin, *test.draw(length - PAGE_TOKENS + PRESSED_STEPS)]
        named.append((f"request {number} of {length} and {PRESSED_STEPS} tokens", (tokens, length)))
    found = press(test.engine, named)
    test.requests += found.requests
    test.preempted += found.preempted
    test.failures += [f"full pool: {deviation}" for deviation in found.deviations[:3]]


SCENARIOS = (
    Scenario(batch),
    Scenario(equal),
    Scenario(turns, (Engine.extend,)),
    Scenario(fork, (Engine.fork,)),
    Scenario(evicted_fork, (Engine.fork,)),
    Scenario(prefix),
    Scenario(talk, (Engine.extend,)),
    Scenario(shared, (Engine.fork,)),
    Scenario(schedule),
    Scenario(lengths),
    Scenario(answers),
    Scenario(full_pool, (Engine.press,)),
    Scenario(crowd),
    Scenario(wear),
)
