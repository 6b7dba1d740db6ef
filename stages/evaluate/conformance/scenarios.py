"""The scenarios of the stress test: a function per scenario, and the table of all scenarios.

Tokens are random, with the seed of the run. Lengths and orders are random, too, unless a boundary of a page, tile or policy
determines them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stages.engines.interface import (
    SupportsExtend,
    SupportsForgetting,
    SupportsFork,
    SupportsFullPool,
    SupportsRequests,
)
from stages.evaluate.conformance.crowd import crowd, full_pool, wear
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.evaluate.conformance.stress import StressTest
from stages.policies.policy import PAGE_TOKENS

STEPS = 4
"""Default number of decode steps of a sequence."""

CLAIMED_STEPS = 12
"""Maximum number of tokens in the free answer to a prompt of the claimed length."""

LEAVING = 32
"""Number of steps over which most rows of the ragged batch end, one by one, to cover many batch sizes."""

FORKED_AT = (PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1)
"""Lengths in tokens of forked sequences. The fork copies a nearly full page, no page, or a nearly empty page."""

TURNS = ((60, 1, 5), (61, 9, 2), (20, 41, 60), (57, 62, 7))
"""(tokens of the prompt, of the second turn, of the third turn). A turn is followed by three decoded tokens, so that the
lengths are at and next to page boundaries."""

TILES = (144, 176, 208, 240, 320, 384, 448, 512)
"""Prompt lengths in tokens. Every multiple of 16 up to 256 divides one of them, and so do larger tiles of 320 to 512 tokens."""

CONTINUED = 6
"""Maximum number of different rows among many forks. Forks with equal tokens share a replay."""

KEPT_CHUNKS = 5
"""Maximum number of chunks in a kept prefix."""

WAITING = 140
"""Number of prompts in one call of `generate`."""

OTHER_STOPS = 8
"""Number of stop tokens that an answer does not contain, in addition to the one that ends it."""


@dataclass(frozen=True)
class Scenario:
    """A scenario and the capabilities that it needs."""

    run: Callable[[StressTest], None]
    needs: tuple[type, ...] = ()

    @property
    def name(self) -> str:
        return self.run.__name__


def batch(test: StressTest) -> None:
    """Decode a ragged batch of the largest size, with free answers first and forced decode second.

    Two rows have the claimed length. Rows end successively, so that the batch has many sizes; the rows with the most decode
    steps end last. The last two rows decode their own free answers. Their prompts have two pages or more, because answers to
    short random prompts repeat one token. The longest row gets none, so that it is prefilled only once.
    """
    sequences = ragged(test)
    more = [test.sequence("a prompt that joins", 1 + 7 * i % 41, 1 + i % 3) for i in range(test.largest // 2 + 1)]
    asked = [*sequences[1:], *more]
    limits = [min(2, len(sequence.ahead)) for sequence in sequences[1:]] + [len(sequence.ahead) for sequence in more]
    for place in range(max(1, len(sequences) - 2), len(sequences)):
        limits[place - 1] = len(sequences[place].ahead)
    for sequence, answer in zip(asked, test.ask(asked, limits), strict=True):
        sequence.ahead[: len(answer)] = answer
    test.serve(sequences)


def ragged(test: StressTest) -> list[ForcedSequence]:
    """Return the rows of the ragged batch. The first row and the last but one are long, the others short."""
    size, most, config = test.largest, test.max_tokens, test.config
    steps = 1 + min(config.offset_steps, most // 2)  # the first step runs alone
    far = min(config.decode_steps, most - 32)
    claimed = min(test.claimed, most - STEPS)
    # Together with the row of 1 token, the answer decodes at most of the lengths up to the claimed length.
    latest = max(2 * PAGE_TOKENS, claimed - far)
    begins = test.length(min(max(2 * PAGE_TOKENS, far), latest), latest)
    chosen = [
        test.sequence(f"{most:,} tokens", most - steps, steps),
        test.sequence("a long answer", min(begins, most - far), far),
        test.sequence("a row of the claimed length", claimed, min(CLAIMED_STEPS, most - claimed)),
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
    """Return prompt lengths for a batch: pairs of equal random page offsets, then lengths at the policy's boundaries."""
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
    """Decode equal prompts that diverge within a page and past its end, prompts that differ from the last token of a page on,
    and prompts that differ before an equal second page."""
    prompt = test.draw(PAGE_TOKENS - STEPS)
    role = f"equal prompts of {len(prompt)} tokens that part"
    test.serve([test.sequence(role, prompt, 2 * STEPS) for _ in range(2)])
    page, role = test.draw(PAGE_TOKENS), "prompts that differ before an equal page"
    if test.max_tokens >= 2 * PAGE_TOKENS + STEPS:
        test.serve([test.sequence(role, [*test.draw(PAGE_TOKENS), *page], STEPS) for _ in range(2)])
        role = "prompts that part at the end of a page"
        test.serve([test.sequence(role, [*page[:-1], *test.draw(STEPS)], STEPS) for _ in range(2)])


def turns(test: StressTest) -> None:
    """Decode sequences with three turns together: prompt, decode, chunk, decode, chunk, decode. Fork every second sequence."""
    drawn: tuple[int, int, int] = tuple(test.rng.integers(1, PAGE_TOKENS + 1, 3).tolist())
    fitting = [turn for turn in (*TURNS, drawn) if sum(turn) + 9 <= test.max_tokens]
    forks = isinstance(test.engine, SupportsFork) and test.largest > 1
    for begin in range(0, len(fitting), each := max(1, test.largest // (1 + forks))):
        together = fitting[begin : begin + each]
        sequences = [test.sequence(f"turns of {', '.join(map(str, turn))} tokens", turn[0]) for turn in together]
        chunks = [turn[1:] for turn in together]
        test.prefill(*sequences)
        for number in range(2):
            test.decode(*sequences, steps=3)
            if number == 1 and forks:
                sequences += [test.fork(sequence, f"{sequence.name}, forked before the last") for sequence in sequences[::2]]
                chunks += chunks[::2]
            for sequence, chunk in zip(sequences, chunks, strict=True):
                test.extend(sequence, chunk[number])
        test.decode(*sequences, steps=3)
        test.release(*sequences)


def fork(test: StressTest) -> None:
    """Decode both branches of a fork, release the origin, reuse its pages, and fork a fork twice."""
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
    """Evict a page from the origin of a fork, start a new sequence, and decode the branch, which still reads the page."""
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


def prefix(test: StressTest) -> None:
    """Run prompts with equal prefixes in succession, on an engine that keeps prefixes for later prompts."""
    chunk = test.engine.prefill_chunk
    if not test.engine.keeps_prefixes or chunk + PAGE_TOKENS > test.max_tokens:
        return
    count = min(KEPT_CHUNKS, (test.max_tokens - PAGE_TOKENS) // chunk)
    beginning = test.draw(count * chunk)
    alike = [
        (f"prompt {number} with one beginning", [*beginning[: kept * chunk], *test.draw(more)])
        for number, (kept, more) in enumerate(((1, 5), (count, 5), (count, 40)), 1)
    ]
    others = [("a prompt that parts from it and ends alike", [*test.draw(chunk), *beginning[chunk : 2 * chunk], *test.draw(5)])]
    if count > 1:
        others += [
            ("a kept beginning", beginning),
            ("a kept beginning and a whole chunk", [*beginning[:chunk], *test.draw(chunk)]),
            ("a kept beginning with another last chunk", [*beginning[:-chunk], *test.draw(chunk + 5)]),
            ("a kept beginning with swapped chunks", [*beginning[chunk : 2 * chunk], *beginning[:chunk], *test.draw(5)]),
        ]
        for place in (chunk - 1, test.length(0, chunk - 2)):
            changed = [*beginning[:place], (beginning[place] + 1) % test.engine.vocab_size, *beginning[place + 1 : 2 * chunk]]
            others.append((f"a kept beginning with another token {place}", [*changed, *test.draw(5)]))
    for number, (role, prompt) in enumerate([*alike, *others]):
        sequence, reuses = test.sequence(role, prompt, STEPS), 0 < number < len(alike)
        test.prefill(sequence)
        test.counts["prefixes"] += reuses
        if reuses and isinstance(test.engine, SupportsExtend):
            test.decode(sequence)
            test.extend(sequence, test.length(1, STEPS))
        test.finish([sequence])
    live = test.sequence("a prompt whose kept beginning is dropped", [*beginning[:chunk], *test.draw(5)], STEPS)
    test.prefill(live)
    if isinstance(test.engine, SupportsForgetting):
        test.engine.forget_prefixes()
    other = test.sequence("a new prompt afterwards", chunk + 5, STEPS)
    test.prefill(other)
    test.finish([live, other])


def talk(test: StressTest) -> None:
    """Run a conversation of up to all tokens, most of them in the first later turn; fork it before the last turn.

    The fourth later turn ends with a page. If the policy evicts or has a window, the longest turn is shorter and the prompt
    longer.
    """
    policy, all_kept = test.engine.policy, test.max_tokens
    window = all_kept if policy.window is None else policy.window.tokens
    # The cache would drop some tokens of a longer turn before they can be recorded.
    longest = min(window, policy.latest_tokens(test.engine.shape) or all_kept)
    lengths = [min(longest, test.length(*span)) for span in ((63, 66), (1, 9), (64, 64), (63, 120), (70, 130))]
    room = test.max_tokens - sum(lengths) - 40
    if room < 2:
        return
    lengths.insert(0, min(longest, room - test.length(1, min(2 * PAGE_TOKENS, room // 2))))
    origin = test.sequence("a long conversation", room - lengths[0])
    test.prefill(origin)
    for number, length in enumerate(lengths[:-1]):
        test.decode(origin, steps=3)
        test.extend(origin, min(length, PAGE_TOKENS - len(origin.tokens) % PAGE_TOKENS) if number == 3 else length)
    test.decode(origin, steps=3)
    rows = [origin]
    if isinstance(test.engine, SupportsFork) and test.largest > 1:
        rows.append(test.fork(origin, "a fork of a long conversation"))
        test.decode(*rows[::-1], steps=STEPS)
    test.extend(rows[-1], lengths[-1])
    test.decode(*rows, steps=STEPS)
    test.release(*rows)


def shared(test: StressTest) -> None:
    """Fork many rows from a prefix, and forks of forks. Release most rows, and reuse their pages.

    The prefix ends 1 to 3 tokens before the end of a page, so that many rows need a new page in the same step.
    """
    count, pages = test.largest - 1, min(test.length(2, 4), (test.max_tokens - 4 * STEPS) // PAGE_TOKENS)
    if count < 3:
        return
    length = pages * PAGE_TOKENS - test.length(1, 3)
    origin = test.sequence(f"a prefix of {length} tokens", length)
    test.prefill(origin)
    rows: list[ForcedSequence] = []
    for number in range(count):
        # Every second row is a fork of the second row before it.
        rows.append(test.fork(rows[-2] if number > 1 and number % 2 else origin, f"row {number} on one prefix", 3 * STEPS))
        if number >= CONTINUED:
            rows[-1].ahead = list(rows[-1 - CONTINUED].ahead)
    test.decode(*rows, steps=2)
    test.decode(*rows[1::2])  # from here on, the rows differ in length
    test.decode(*rows)
    kept = rows[2 * count // 3 :]
    test.release(origin, *rows[: 2 * count // 3])
    fresh = [test.sequence("a new sequence beside them", min(n, length)) for n in (test.length(65, 140), test.length(33, 90))]
    test.prefill(*fresh)
    test.decode(*kept, *fresh, steps=STEPS + 2)
    test.release(*kept, *fresh)


def schedule(test: StressTest) -> None:
    """Reorder rows, let rows skip steps and pause, cancel a row after its prompt, and release a row whose pages are full."""
    if isinstance(test.engine, SupportsRequests) or test.largest < 4 or test.max_tokens < 4 * PAGE_TOKENS:
        return
    rows = [test.sequence(f"row {number}", test.length(1, 2 * PAGE_TOKENS)) for number in range(min(4, test.largest - 2))]
    test.prefill(*rows)
    test.decode(*rows, steps=2)
    cancelled = test.sequence("cancelled after its prompt", test.length(1, 90))
    test.prefill(cancelled)
    test.release(cancelled)
    length = test.length(1, 3) * PAGE_TOKENS - STEPS
    full, beside = (test.sequence(role, length) for role in ("ends with a full page", "beside a full page"))
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
    test.decode(*rows)
    test.decode(rows[0], *rows[-2:0:-1], rows[-1])  # only the middle rows change places
    test.decode(*rows[:2], steps=PAGE_TOKENS - 20)
    test.decode(*rows[::-1], steps=3)
    test.release(*rows)


def lengths(test: StressTest) -> None:
    """Decode prompts of whole tiles, whole chunks and random lengths across their boundaries, then a batch of their forks."""
    chunk = test.engine.prefill_chunk
    drawn = (chunk + test.length(1, 8), test.length(430, 980))
    fitting = sorted((length for length in (*TILES, chunk, *drawn) if length + 8 <= test.max_tokens), reverse=True)
    rows = [test.sequence(f"a prompt of {length} tokens", length, STEPS + 2) for length in fitting[: test.largest]]
    if rows and isinstance(test.engine, SupportsRequests):
        test.serve(rows)
    if not rows or isinstance(test.engine, SupportsRequests):
        return
    test.prefill(*rows)
    test.decode(*rows, steps=STEPS)
    for number in range(test.largest - len(rows) if isinstance(test.engine, SupportsFork) else 0):
        row = rows[number % min(CONTINUED, len(fitting))]
        branch = test.fork(row, f"{row.name}, forked")
        branch.ahead = list(row.ahead)  # equal tokens, so that one replay serves all
        rows.append(branch)
    # Neighbours differ in their tokens: a row that reads its neighbour's page must show.
    blocks = [range(begin, min(begin + CONTINUED, len(rows))) for begin in range(0, len(rows), CONTINUED)]
    for _ in range(2):
        order = [place for block in test.rng.permutation(len(blocks)) for place in test.rng.permutation(blocks[block])]
        test.decode(*(rows[place] for place in order))
    test.release(*rows)


def offsets(test: StressTest) -> None:
    """Decode short prompts of the page offsets at which no other scenario's prompt ended."""
    short = range(1, min(PAGE_TOKENS, test.max_tokens - STEPS) + 1)
    lengths = [length for length in short if length % PAGE_TOKENS not in test.prompt_offsets]
    rows = [test.sequence(f"a prompt of {length} tokens", length, 2) for length in lengths]
    for begin in range(0, len(rows), test.largest):
        test.serve(rows[begin : begin + test.largest])


def answers(test: StressTest) -> None:
    """Generate answers to a long queue with different limits, equal beginnings, equal prompts, and answers with stop tokens."""
    if test.max_tokens < 4 * PAGE_TOKENS:
        return
    waiting = [test.sequence("one of many that wait", test.length(2, 5)) for _ in range(WAITING)]
    test.ask(waiting, test.rng.integers(1, 3, WAITING).tolist(), at_once=max(1, test.largest // 2))
    beginning = test.draw(test.length(2 * PAGE_TOKENS, 3 * PAGE_TOKENS))
    parts = (len(beginning), len(beginning), test.length(PAGE_TOKENS // 2, PAGE_TOKENS - 1))  # the last within the first page
    prompts = [[*beginning[:part], *test.draw(len(beginning) + 9 - part)] for part in parts]
    alike = [test.sequence("prompts with one beginning", prompt) for prompt in prompts]
    asked = zip(alike, test.ask(alike, [10] * len(alike)), strict=True)
    again, answer = max(asked, key=lambda pair: len(set(pair[1])))  # a random prompt's answer may repeat one token
    test.ask([again], [4])
    others = [token for token in test.rng.permutation(test.engine.vocab_size).tolist() if token not in answer][:OTHER_STOPS]
    ends = list(dict.fromkeys(answer))
    for stop in dict.fromkeys([*ends[:2], *ends[test.length(2, 9) :][:1], *ends[-1:]]):
        test.ask([again], [10], [*others, stop])


SCENARIOS = (
    Scenario(batch),
    Scenario(equal),
    Scenario(turns, (SupportsExtend,)),
    Scenario(fork, (SupportsFork,)),
    Scenario(evicted_fork, (SupportsFork,)),
    Scenario(prefix),
    Scenario(talk, (SupportsExtend,)),
    Scenario(shared, (SupportsFork,)),
    Scenario(schedule),
    Scenario(lengths),
    Scenario(answers),
    Scenario(full_pool, (SupportsFullPool,)),
    Scenario(crowd),
    Scenario(offsets),
    Scenario(wear),
)
