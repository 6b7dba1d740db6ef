"""The scenarios of the stress test: what sequences do on the engine, one function each, and the table that lists them.

Tokens are drawn from the seed of the run, and so are the lengths and the order that no border of a page, tile or policy fixes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS
from stages.evaluate.decoding.pressure import press
from stages.evaluate.twins.crowd import crowd, wear
from stages.evaluate.twins.stage import Actor, Stage

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
class Scene:
    """What is run, and what an engine has to be able to for it."""

    play: Callable[[Stage], None]
    needs: tuple[Callable[..., object], ...] = ()

    @property
    def name(self) -> str:
        return self.play.__name__


def batch(stage: Stage) -> None:
    """A ragged batch of the largest size, two of whose rows have the claimed length, answered freely and then forced.

    One row after the other leaves, so that the batch has every size; those that decode far are the last. The longest row is
    prefilled once: no free answer to it is asked.
    """
    actors = ragged(stage)
    more = [stage.actor("a prompt that joins", 1 + 7 * i % 41, 1 + i % 3) for i in range(stage.largest // 2 + 1)]
    asked = [*actors[1:], *more]
    limits = [min(2, len(actor.ahead)) for actor in actors[1:]] + [len(actor.ahead) for actor in more]
    limits[len(actors) - 2] = min(len(actors[-1].ahead), LONG_ANSWER)
    for actor, answer in zip(asked, stage.ask(asked, limits), strict=True):
        actor.ahead[: len(answer)] = answer
    stage.play(actors)


def ragged(stage: Stage) -> list[Actor]:
    """Return the rows of the ragged batch: long ones first and last but one, short ones between them."""
    size, most, config = stage.largest, stage.max_tokens, stage.config
    steps = 1 + min(config.offset_steps, most // 2)  # one alone
    far = min(config.decode_steps, most - 32)
    claimed = min(stage.claimed, most - STEPS)
    chosen = [
        stage.actor(f"{most:,} tokens", most - steps, steps),
        stage.actor("9 tokens and far", 9, far),
        stage.actor("a row of the claimed length", claimed, STEPS),
        stage.actor("1 token and far", 1, far),
    ][:size]
    lengths = offsets_and_borders(stage, size - len(chosen), most - LEAVING - 2)
    rest = [
        stage.actor("a ragged row", length, 2 + i * min(LEAVING, len(lengths)) // len(lengths))
        for i, length in enumerate(lengths)
    ]
    if size < 4:
        return [*chosen[:1], *chosen[2:], *chosen[1:2]]
    longest, answered, long, alone = chosen
    half = len(rest) // 2
    return [longest, *rest[:half], alone, *rest[half:], long, answered]


def offsets_and_borders(stage: Stage, size: int, most: int) -> list[int]:
    """Return the lengths of a batch's prompts: pairs of equal ones at drawn offsets of a page, then the policy's borders."""
    policy = stage.engine.policy
    borders = {policy.sink_tokens, policy.recent_tokens, policy.exact_tokens, PAGE_TOKENS, 2 * PAGE_TOKENS}
    if policy.window is not None:
        borders |= {policy.window.tokens, policy.window.tokens + PAGE_TOKENS}
    if policy.eviction is not None:
        kept = policy.eviction.sink_tokens + policy.eviction.heavy_tokens + policy.eviction.window_tokens
        borders |= {kept, kept + PAGE_TOKENS, kept + 2 * PAGE_TOKENS}
    lengths = sorted({border - 1 for border in borders if 1 < border - 1 <= most})[: size // 2]
    rest = size - len(lengths)
    drawn = stage.rng.permutation(np.arange(1, min(most, PAGE_TOKENS) + 1))
    return [*sorted(int(drawn[i // 2 % len(drawn)]) for i in range(rest)), *lengths]


def equal(stage: Stage) -> None:
    """Equal prompts that share a partial page and then part, in the page and over its border; others share a second page."""
    prompt = stage.draw(PAGE_TOKENS - STEPS)
    role = f"equal prompts of {len(prompt)} tokens that part"
    stage.play([stage.actor(role, prompt, 2 * STEPS) for _ in range(2)])
    page, role = stage.draw(PAGE_TOKENS), "prompts that differ before an equal page"
    if stage.max_tokens >= 2 * PAGE_TOKENS + STEPS:
        stage.play([stage.actor(role, [*stage.draw(PAGE_TOKENS), *page], STEPS) for _ in range(2)])


def turns(stage: Stage) -> None:
    """Turns: prompt, decode, later chunk, decode, later chunk, decode, all together; and of every second one after a fork."""
    drawn: tuple[int, int, int] = tuple(stage.rng.integers(1, PAGE_TOKENS + 1, 3).tolist())
    fitting = [turn for turn in (*TURNS, drawn) if sum(turn) + 9 <= stage.max_tokens]
    forks = stage.engine.can(Engine.fork) and stage.largest > 1
    for begin in range(0, len(fitting), each := max(1, stage.largest // (1 + forks))):
        together = fitting[begin : begin + each]
        actors = [stage.actor(f"turns of {', '.join(map(str, turn))} tokens", turn[0]) for turn in together]
        chunks = [turn[1:] for turn in together]
        stage.prefill(*actors)
        for number in range(2):
            stage.decode(*actors, steps=3)
            if number == 1 and forks:
                actors += [stage.fork(actor, f"{actor.role}, forked before the last") for actor in actors[::2]]
                chunks += chunks[::2]
            for actor, chunk in zip(actors, chunks, strict=True):
                stage.extend(actor, chunk[number])
        stage.decode(*actors, steps=3)
        stage.leave(*actors)


def fork(stage: Stage) -> None:
    """Forks: both branches go on, the origin goes, its pages are used again, and a fork is forked."""
    for length in FORKED_AT:
        if length + 16 > stage.max_tokens or stage.largest < 3:
            return
        origin = stage.actor(f"origin forked at {length} tokens", length, STEPS)
        stage.prefill(origin)
        branch = stage.fork(origin, f"fork at {length} tokens", 2 * STEPS)
        stage.decode(branch, origin, steps=STEPS)
        stage.leave(origin)
        other = stage.actor("a new sequence on an origin's pages", length, STEPS)
        stage.prefill(other)
        second = stage.fork(branch, f"fork of a fork at {length} tokens")
        stage.decode(second, branch, other, steps=STEPS)
        stage.leave(second, branch, other)


def evicted_fork(stage: Stage) -> None:
    """An origin goes on alone until a page leaves it, a new sequence comes, and the branch still reads that page."""
    policy, shape = stage.engine.policy, stage.engine.shape
    first = next((n for n in range(PAGE_TOKENS, stage.max_tokens - 16) if policy.evicted_pages(n, shape)), None)
    if first is None or stage.largest < 3:
        return
    length = first - STEPS // 2  # half of the branch's steps come before it loses the page too
    origin = stage.actor(f"origin that evicts after {length} tokens", length, STEPS)
    stage.prefill(origin)
    branch = stage.fork(origin, f"fork at {length} tokens of an origin that evicted", STEPS)
    stage.decode(origin, steps=STEPS)
    other = stage.actor("a new sequence on evicted pages", 2 * PAGE_TOKENS, STEPS)
    stage.prefill(other)
    stage.decode(branch, other, steps=STEPS)
    stage.leave(origin, branch, other)


def prefix(stage: Stage) -> None:
    """Prompts that begin alike, one after the other, on an engine that keeps such beginnings for later prompts."""
    chunk = stage.engine.prefill_chunk
    if not stage.engine.keeps_prefixes or chunk + PAGE_TOKENS > stage.max_tokens:
        return
    beginning = stage.draw(2 * chunk if 2 * chunk + PAGE_TOKENS <= stage.max_tokens else chunk)
    alike = [
        (f"prompt {number} with one beginning", [*beginning, *stage.draw(more)]) for number, more in enumerate((5, 5, 40), 1)
    ]
    others = [("a prompt that parts from it and ends alike", [*stage.draw(chunk), *beginning[chunk:], *stage.draw(5)])]
    if 2 * chunk + STEPS <= stage.max_tokens:
        others.append(("a kept beginning and a whole chunk", [*beginning[:chunk], *stage.draw(chunk)]))
    for number, (role, prompt) in enumerate([*alike, *others]):
        actor = stage.actor(role, prompt, STEPS)
        stage.prefill(actor)
        stage.prefixes += 0 < number < len(alike)
        stage.go_on([actor])


def talk(stage: Stage) -> None:
    """A long conversation: later turns of up to two pages, after an eviction if the policy has one; its fork goes on, too."""
    policy, all_kept = stage.engine.policy, stage.max_tokens
    window = all_kept if policy.window is None else policy.window.tokens
    # Tokens of a longer turn leave the cache before anything can look at them.
    longest = min(window, policy.latest_tokens(stage.engine.shape) or all_kept)
    lengths = [min(longest, stage.length(*span)) for span in ((130, 190), (63, 120), (1, 9), (20, 62), (63, 66), (70, 130))]
    first = min(1000 if policy.eviction is not None else 700, stage.max_tokens - sum(lengths) - 40)
    if first < 1:
        return
    origin = stage.actor("a long conversation", first)
    stage.prefill(origin)
    for length in lengths[:-1]:
        stage.decode(origin, steps=3)
        stage.extend(origin, length)
    stage.decode(origin, steps=3)
    rows = [origin]
    if stage.engine.can(Engine.fork) and stage.largest > 1:
        rows.append(stage.fork(origin, "a fork of a long conversation"))
        stage.decode(*rows[::-1], steps=STEPS)
    stage.extend(rows[-1], lengths[-1])
    stage.decode(*rows, steps=STEPS)
    stage.leave(*rows)


def shared(stage: Stage) -> None:
    """Many rows on one prefix that ends in a page; most leave, and new sequences take their pages."""
    count, length = min(SHARING, stage.largest - 1), min(stage.length(130, 250), stage.max_tokens - 4 * STEPS)
    if count < 3:
        return
    origin = stage.actor(f"a prefix of {length} tokens", length)
    stage.prefill(origin)
    rows = [stage.fork(origin, f"row {number} on one prefix") for number in range(count)]
    stage.decode(*rows, steps=STEPS)
    kept = rows[2 * count // 3 :]
    stage.leave(origin, *rows[: 2 * count // 3])
    fresh = [stage.actor("a new sequence beside them", min(n, length)) for n in (stage.length(65, 140), stage.length(33, 90))]
    stage.prefill(*fresh)
    stage.decode(*kept, *fresh, steps=STEPS + 2)
    stage.leave(*kept, *fresh)


def schedule(stage: Stage) -> None:
    """Rows change places, sit out steps, and sleep long; one is cancelled, one ends with a full page."""
    if stage.engine.can(Engine.forced_together) or stage.largest < 4 or stage.max_tokens < 4 * PAGE_TOKENS:
        return
    rows = [stage.actor(f"row {number}", stage.length(1, 2 * PAGE_TOKENS)) for number in range(min(4, stage.largest - 2))]
    stage.prefill(*rows)
    stage.decode(*rows, steps=2)
    cancelled = stage.actor("cancelled after its prompt", stage.length(1, 90))
    stage.prefill(cancelled)
    stage.leave(cancelled)
    full, beside = (stage.actor(role, PAGE_TOKENS - STEPS) for role in ("ends with a full page", "beside a full page"))
    stage.prefill(full, beside)
    stage.decode(full, beside, steps=STEPS)
    stage.leave(full)
    late = stage.actor("begins on a full page", stage.length(70, 150))
    stage.prefill(late)
    stage.decode(late, beside, steps=STEPS + 2)
    stage.leave(late, beside)
    for _ in range(6):
        order = stage.rng.permutation(len(rows))[: stage.length(1, len(rows))]
        stage.decode(*(rows[place] for place in order))
    stage.decode(*rows[:2], steps=PAGE_TOKENS - 20)
    stage.decode(*rows[::-1], steps=3)
    stage.leave(*rows)


def lengths(stage: Stage) -> None:
    """Prompts of whole tiles and chunks, caches that cross them, drawn ones up to the longest, and many tokens in one step."""
    chunk = min(stage.engine.prefill_chunk, stage.max_tokens - 8)
    drawn = [stage.length(430, 980) for _ in range(2)]
    fitting = [length for length in (256, 512, chunk, 510, *drawn) if length + 8 <= stage.max_tokens]
    rows = [stage.actor(f"a prompt of {length} tokens", length, STEPS + 2) for length in fitting[: stage.largest]]
    if rows and stage.engine.can(Engine.forced_together):
        stage.play(rows)
    if not rows or stage.engine.can(Engine.forced_together):
        return
    stage.prefill(*rows)
    stage.decode(*rows, steps=STEPS)
    others: list[Actor] = []
    if stage.engine.can(Engine.fork):  # sequences of the longest prompt, which only make the step larger
        longest = max(rows, key=lambda actor: len(actor.tokens))
        others = [stage.fork(longest, "") for _ in range(min(9, stage.largest - len(rows)))]
    for other in others:
        other.watched = False
    stage.decode(*others, *rows, steps=2)
    stage.leave(*others, *rows)


def answers(stage: Stage) -> None:
    """Free answers: a long one, many that wait, equal prompts with other limits, equal first pages, and two stop tokens."""
    most = min(LONGEST_ANSWER, stage.max_tokens - 50)
    if most < PAGE_TOKENS:
        return
    long, again = stage.actor("a long answer", 40), stage.actor("the same prompt again", 50)
    (said,) = stage.ask([long], [most])
    for limit in (4, 10):
        (short,) = stage.ask([again], [limit])
    waiting = [stage.actor("one of many that wait", stage.length(3, 12)) for _ in range(WAITING)]
    stage.ask(waiting, [3] * len(waiting), at_once=max(1, stage.largest // 2))
    page = stage.draw(min(PAGE_TOKENS, most))
    alike = [stage.actor("prompts with one first page", [*page, *stage.draw(9)]) for _ in range(3)]
    stage.ask(alike, [6] * len(alike))
    other = next(token for token in range(stage.engine.vocab_size) if token not in {*short, *said})
    for actor, stop, limit in ((again, short[:1], 10), (long, said[-1:], most)):
        if stop:
            stage.ask([actor], [limit], [other, *stop])


def full_pool(stage: Stage) -> None:
    """Requests in a pool that holds a third of them, half of which begin alike: they wait, give way, and come again.

    An engine that is asked with samples by default is not asked here.
    """
    if stage.engine.pressed_requests or stage.max_tokens < 5 * PAGE_TOKENS:
        return
    page, named = stage.draw(PAGE_TOKENS), []
    for number in range(PRESSED):
        length = (1 + number % 3) * PAGE_TOKENS + stage.length(PAGE_TOKENS - PRESSED_STEPS + 6, PAGE_TOKENS - 1)
        begin = page if number % 2 else stage.draw(PAGE_TOKENS)
        tokens = [*begin, *stage.draw(length - PAGE_TOKENS + PRESSED_STEPS)]
        named.append((f"request {number} of {length} and {PRESSED_STEPS} tokens", (tokens, length)))
    found = press(stage.engine, named)
    stage.requests += found.requests
    stage.preempted += found.preempted
    stage.failures += [f"full pool: {deviation}" for deviation in found.deviations[:3]]


SCENES = (
    Scene(batch),
    Scene(equal),
    Scene(turns, (Engine.extend,)),
    Scene(fork, (Engine.fork,)),
    Scene(evicted_fork, (Engine.fork,)),
    Scene(prefix),
    Scene(talk, (Engine.extend,)),
    Scene(shared, (Engine.fork,)),
    Scene(schedule),
    Scene(lengths),
    Scene(answers),
    Scene(full_pool, (Engine.press,)),
    Scene(crowd),
    Scene(wear),
)
