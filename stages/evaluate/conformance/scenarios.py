"""The scenarios of the stress test: a function per scenario, and the table of all scenarios.

Tokens, lengths and orders are random, with the seed of the run, unless a boundary of a page, tile or policy determines them.
"""

from collections.abc import Callable

import numpy as np

from stages.engines.interface import SupportsFork, SupportsFullPool
from stages.evaluate.conformance.crowd import crowd, full_pool, wear
from stages.evaluate.conformance.operations import StressTest
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.evaluate.conformance.walk import CONTINUED, walk
from stages.policies.policy import PAGE_TOKENS

STEPS = 4

CLAIMED_STEPS = 12
"""Maximum tokens of the free answer to a prompt as long as the longest sample."""

LEAVING = 32
"""Number of steps over which most rows of the ragged batch end, one by one, to cover many batch sizes."""

RECALLED = 12
"""Last tokens of a prompt that repeat a part of its second page."""
ONE_PAGE = 6
"""Number of prompts in the same call that share the first page."""
PROMPTS = 8
"""Number of prompts without a common beginning, answered in several calls."""
CALLS = 5
"""Number of calls that repeat prompts."""
ANSWER = 18
"""Maximum tokens of one answer."""
CONTINUATIONS = 8
"""Number of prompts that continue a prompt and its answer."""

SHORT = 30
"""Number of different short prompts in the long queue."""
REPEATED = 110
"""Number of further prompts in the queue, which repeat the SHORT ones."""
LONG_ANSWERS = (160, 256)
"""Tokens of the first long answer in the queue, and of the two others, which are also limited by `decode_steps`."""


def batch(test: StressTest) -> None:
    """Decode a ragged batch of the largest size: first free answers, then forced decode.

    Rows end one after another, so that the batch has many sizes. The last two rows decode their own free answers. Their prompts
    have at least two pages, because answers to short random prompts repeat one token.
    """
    sequences = ragged(test)
    count = test.scaled(test.largest // 2) + 1
    more = [test.sequence("a prompt that joins", test.randint(1, 41), test.randint(1, 3)) for _ in range(count)]
    whole = sequences[max(1, len(sequences) - 2) :]
    asked = [*more, *sequences[-max(len(whole), test.scaled(len(sequences))) :]]  # long prompts wait, too
    limits = [
        min(len(row.ahead), max(ANSWER, test.scaled(len(row.ahead))) if row in whole or row in more else 2) for row in asked
    ]
    for sequence, answer in zip(asked, test.ask(asked, limits), strict=True):
        sequence.ahead[: len(answer)] = answer
    test.serve(sequences)


def ragged(test: StressTest) -> list[ForcedSequence]:
    """Return the rows of the ragged batch. The first row and the last two have long prompts, the others mostly short ones."""
    size, most, config = test.largest, test.max_tokens, test.config
    steps = 1 + min(config.offset_steps, most // 2)  # the first step runs alone
    far = min(config.decode_steps, most - 32)
    claimed = min(test.claimed, most - STEPS)
    # The long answer and the row of 1 token together decode at many of the lengths up to the claimed length.
    latest = max(2 * PAGE_TOKENS, claimed - far)
    begins = test.randint(min(max(2 * PAGE_TOKENS, far), latest), latest)
    chosen = [
        test.sequence(f"{most:,} tokens", most - steps, steps),
        test.sequence("a long answer", min(begins, most - far), far),
        test.sequence("a row of the claimed length", claimed, min(CLAIMED_STEPS, most - claimed)),
        test.sequence("a long decode from 1 token", 1, far),
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
    """Return prompt lengths for a batch: pairs of equal random page offsets, then lengths at the policy's boundaries."""
    policy = test.engine.policy
    borders = {policy.sink_tokens, policy.recent_tokens, policy.exact_tokens, PAGE_TOKENS, 2 * PAGE_TOKENS}
    if policy.window is not None:
        borders |= {policy.window.tokens, policy.window.tokens + PAGE_TOKENS}
    if policy.eviction is not None:
        eviction = policy.eviction  # without heavy hitters, tokens are evicted when their page has left the window
        exact = eviction.sink_tokens + eviction.heavy_tokens + eviction.window_tokens
        kept = exact if eviction.heavy_tokens else eviction.gap_length
        borders |= {kept, kept + PAGE_TOKENS, kept + 2 * PAGE_TOKENS}
    lengths = sorted({border - 1 for border in borders if 1 < border - 1 <= most})[: size // 2]
    rest = size - len(lengths)
    drawn = test.rng.permutation(np.arange(1, min(most, PAGE_TOKENS) + 1))
    return [*sorted(int(drawn[i // 2 % len(drawn)]) for i in range(rest)), *lengths]


def equal(test: StressTest) -> None:
    """Decode prompts that have tokens in common.

    - Equal prompts decode different tokens, within a page and past its end.
    - Two prompts have different first pages and an equal second page. A third prompt begins with this page.
    - Prompts differ from the last token of a page on, or only in their own last token.
    - Prompts begin like the last released sequence: with all of its tokens, or up to a few tokens before or after a page's end.
    """
    prompt = test.draw(PAGE_TOKENS - test.randint(1, 2 * STEPS - 1))
    role = f"equal prompts of {len(prompt)} tokens with different continuations"
    test.serve([test.sequence(role, prompt, 2 * STEPS) for _ in range(2)])
    page, role = test.draw(PAGE_TOKENS), "prompts with an equal page"
    if test.max_tokens >= 2 * PAGE_TOKENS + STEPS:
        pages = [[*test.draw(PAGE_TOKENS), *page], [*test.draw(PAGE_TOKENS), *page], [*page, *test.draw(PAGE_TOKENS)]]
        test.serve([test.sequence(role, prompt, STEPS) for prompt in pages[: test.largest]])
        role = "prompts that part at the end of a page"
        test.serve([test.sequence(role, [*page[:-1], *test.draw(STEPS)], STEPS) for _ in range(2)])
        begin, role = test.draw(test.randint(PAGE_TOKENS // 2, 2 * PAGE_TOKENS - 1)), "prompts that differ in the last token"
        test.serve([test.sequence(role, [*begin, *test.draw(1)], STEPS) for _ in range(2)])
    if test.max_tokens >= 5 * PAGE_TOKENS:
        sent = test.sequence("a conversation", test.randint(3 * PAGE_TOKENS, 4 * PAGE_TOKENS - STEPS), STEPS)
        near = test.randint(1, 8)
        ends = (4 * PAGE_TOKENS, 3 * PAGE_TOKENS - near, test.randint(1, 2) * PAGE_TOKENS + near)
        first = test.randint(0, len(ends) - test.scaled(len(ends)))
        for end in ends[first : first + test.scaled(len(ends))]:
            test.serve([sent])
            rest = test.draw(test.randint(5, PAGE_TOKENS // 2))
            sent = test.sequence("a prompt that begins like the last sequence", [*sent.tokens[:end], *rest], STEPS)
        test.serve([sent])


def evicted_fork(test: StressTest) -> None:
    """Evict a page from the origin of a fork, start a new sequence, and decode the fork, which still reads the page."""
    policy, shape = test.engine.policy, test.engine.shape
    first = next((n for n in range(PAGE_TOKENS, test.max_tokens - 16) if policy.evicted_pages(n, shape)), None)
    if first is None or test.largest < 3:
        return
    length = first - STEPS // 2  # the branch evicts this page halfway through its steps
    origin = test.sequence(f"origin that evicts after {length} tokens", length, STEPS)
    test.prefill(origin)
    branch = test.fork(origin, f"fork at {length} tokens of an origin that evicted", STEPS)
    test.decode(origin, steps=STEPS)
    other = test.sequence("a new sequence on evicted pages", 2 * PAGE_TOKENS, STEPS)
    test.prefill(other)
    test.decode(branch, other, steps=STEPS)
    test.release(origin, branch, other)


def shared(test: StressTest) -> None:
    """Fork many rows from a prefix, and forks of forks. Release most rows, and reuse their pages.

    The prefix ends 3 to 5 tokens before the end of a page, and many rows need a new page in the same step. The rows decode
    different tokens first and the same token second. Then the prefix grows past the page's end and is forked again, so that
    the first two rows of a batch, or the first and the last, share more than the others. After that, a sequence that shares
    nothing decodes beside the forks.
    """
    count, pages = test.largest - 1, min(test.randint(2, 5), (test.max_tokens - 4 * STEPS) // PAGE_TOKENS)
    if count < 3 or pages < 2:
        return
    again = test.draw(1)[0]
    left = test.randint(3, 5)
    length = pages * PAGE_TOKENS - left
    origin = test.sequence(f"a prefix of {length} tokens", length)
    test.prefill(origin)
    rows: list[ForcedSequence] = []
    for number in range(count):
        # Every second row is forked from the row two places before.
        rows.append(test.fork(rows[-2] if number > 1 and number % 2 else origin, f"fork {number} of one prefix", 4 * STEPS))
        rows[-1].ahead[1] = again
        if number >= CONTINUED:
            rows[-1].ahead = list(rows[-1 - CONTINUED].ahead)
    test.decode(*rows[: count // 2])
    test.decode(origin)  # before its later forks decode
    test.decode(*rows[count // 2 :])
    test.decode(*rows, steps=left - 2)
    test.decode(*rows[1::2])  # from here on, the rows differ in length
    test.decode(*rows)
    test.extend(origin, left + test.randint(1, 9))
    test.release(rows.pop())
    late = test.fork(origin, "a later fork, which shares more with the prefix")
    test.decode(origin, late, *rows[:-1])
    test.decode(origin, *rows[:-1], late)
    test.release(late)
    test.release(origin)
    other, place = test.sequence("a sequence beside the forks", min(length, test.randint(65, 140))), test.randint(0, len(rows))
    test.prefill(other)
    test.decode(*rows[:place], other, *rows[place:])
    test.release(other)
    kept = rows[2 * len(rows) // 3 :]
    test.release(*rows[: 2 * len(rows) // 3])
    fresh = [test.sequence("a new sequence beside them", min(n, length)) for n in (test.randint(65, 140), test.randint(33, 90))]
    test.prefill(*fresh)
    test.decode(*kept, *fresh, steps=STEPS + 2)
    test.release(*kept[:-1], *fresh)
    late = test.sequence("a new sequence beside the last row", min(length, test.randint(65, 140)))
    test.prefill(late)
    test.decode(kept[-1], late, steps=2)
    test.release(kept[-1], late)


def offsets(test: StressTest) -> None:
    """Decode short prompts that end at the page offsets where no earlier prompt ended."""
    short = range(1, min(PAGE_TOKENS, test.max_tokens - STEPS) + 1)
    lengths = [length for length in short if length % PAGE_TOKENS not in test.prompt_offsets]
    chosen = test.rng.permutation(lengths)[: test.scaled(len(lengths))].tolist()
    rows = [test.sequence(f"a prompt of {length} tokens", length, 2) for length in sorted(chosen)]
    for begin in range(0, len(rows), test.largest):
        test.serve(rows[begin : begin + test.largest])


def answers(test: StressTest) -> None:
    """Generate answers to prompts, of which up to eleven begin alike, in several calls with other orders, limits and stops."""
    if test.max_tokens < 4 * PAGE_TOKENS:
        return
    beginning = test.quote(test.randint(2 * PAGE_TOKENS, 3 * PAGE_TOKENS))
    equal = [test.randint(PAGE_TOKENS // 2, PAGE_TOKENS - 1), test.randint(PAGE_TOKENS, 5 * PAGE_TOKENS // 4)]
    equal += [len(beginning)] * test.scaled(2)
    begins = [[*beginning[:count], *test.quote(len(beginning) - count)] for count in equal]
    # The end repeats a part of the prompt's second page, so that the answer depends on this page.
    places = [test.randint(5 * PAGE_TOKENS // 4, 2 * PAGE_TOKENS - RECALLED) for _ in begins]
    prompts = [[*begin, *begin[place : place + RECALLED]] for begin, place in zip(begins, places, strict=True)]
    prompts += [[*beginning[:PAGE_TOKENS], *test.quote(test.randint(1, 9))] for _ in range(test.scaled(ONE_PAGE))]
    lengths = np.exp(test.rng.uniform(1, np.log(3 * PAGE_TOKENS), test.scaled(PROMPTS))).astype(int)
    prompts += [beginning, *map(test.quote, lengths.tolist())]
    asked = [test.sequence("one of several prompts in one call", prompt) for prompt in prompts]
    first = test.ask(asked, [test.randint(10, ANSWER) for _ in asked])
    answered = [(sequence, answer) for sequence, answer in zip(asked, first, strict=True) if answer]
    shortest = sorted(answered, key=lambda pair: len(pair[0].prompt))[: test.scaled(CONTINUATIONS)]
    continued = [[*sequence.prompt, *answer, *test.draw(STEPS)] for sequence, answer in shortest]
    test.ask([test.sequence("a conversation that goes on", prompt) for prompt in continued], [ANSWER] * len(continued))
    for call in range(test.scaled(CALLS) if answered else 0):
        chosen = [answered[i] for i in test.rng.permutation(len(answered))[: test.randint(1, len(answered))]]
        limits = [test.randint(1, len(answer)) if call % 2 else len(answer) for _, answer in chosen]
        within = [test.pick(answer) for _, answer in chosen[: test.randint(1, 3) if call % 2 else None]]
        places = [answer.index(token) for (_, answer), token in zip(chosen, within, strict=False)]
        limits[0] = places[0] + 1  # a stop token is the last token that the limit allows
        last = [sequence.prompt[-1] for sequence, _ in chosen[:2]]  # a prompt may end in a stop token
        near = [(answer[0] + 256) % test.engine.vocab_size for _, answer in chosen[:2]]  # equal in its low byte
        others = [token for token in (*test.draw(8), *last, *near) if not any(token in answer for answer in first)]
        stops = [*others, *sorted(set(within))][call % 3 :]
        sequences = [sequence for sequence, _ in chosen]
        # In the first call, one prompt runs at a time. In every second call, most answers end by a stop token, and others wait.
        most = test.largest if call % 2 else max(1, min(test.largest, len(chosen) // 2))
        test.ask(sequences, limits, stops, test.randint(1, most if call else 1))


def long_queue(test: StressTest) -> None:
    """Generate three long answers while many short prompts, and one whose answer ends with a page, wait for other places."""
    if test.max_tokens < 4 * PAGE_TOKENS:
        return
    waiting = [test.sequence("a short prompt in a long queue", test.randint(2, 9)) for _ in range(test.scaled(SHORT))]
    waiting += [waiting[i] for i in test.rng.integers(0, len(waiting), test.scaled(REPEATED))]
    limits = [*np.minimum(test.rng.geometric(0.4, len(waiting)), PAGE_TOKENS).tolist(), test.randint(2, ANSWER // 2)]
    waiting.append(test.sequence("the last prompt in a long queue", test.quote(2 * PAGE_TOKENS - limits[-1])))
    # Long prompts are quotes, because answers to short random prompts repeat one token. The waiting requests take turns in the
    # remaining places.
    long = [test.sequence("a prompt with a long answer", test.quote(test.randint(9, PAGE_TOKENS))) for _ in range(3)]
    at_once = len(long) + max(1, test.largest // test.randint(2, 6))
    least, most = map(test.scaled, LONG_ANSWERS)
    longest = max(least, min(most, test.config.decode_steps, test.max_tokens - PAGE_TOKENS))
    test.ask([*long, *waiting], [least, longest, longest, *limits], at_once=min(at_once, test.largest))


SCENARIOS: dict[Callable[[StressTest], None], tuple[type, ...]] = {
    walk: (),  # first: its many sequences show how large a rounding is, and the engine idles long while they are compared
    equal: (),
    batch: (),
    evicted_fork: (SupportsFork,),
    shared: (SupportsFork,),
    answers: (),
    long_queue: (),
    full_pool: (SupportsFullPool,),
    crowd: (),
    offsets: (),
    wear: (),
}
"""Scenario -> the capabilities that it needs, in the order of the test."""
