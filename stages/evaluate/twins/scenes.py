"""The scenes of the stress probe: what sequences do on the engine, one function a scene, and the table that lists them.

Lengths and order are the same in each run, tokens are not.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS, KVPolicy
from stages.evaluate.twins.crowd import crowd
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


@dataclass(frozen=True)
class Scene:
    """What is played, and what an engine has to be able to for it."""

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
    answers = stage.engine.generate([actor.prompt for actor in asked], limits, None, max_sequences=stage.largest)
    stage.requests += len(asked)
    for actor, answer, limit in zip(asked, answers, limits, strict=True):
        if len(answer) != limit:
            stage.failures.append(
                f"generate: {len(answer)} tokens instead of {limit} to a prompt of {len(actor.prompt)} tokens"
            )
        actor.ahead[: len(answer)] = answer
    stage.answers = [(actor.role, actor.prompt, list(said)) for actor, said in zip(asked, answers, strict=True) if said]
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
    lengths = offsets_and_borders(stage.engine.policy, size - len(chosen), most - LEAVING - 2)
    rest = [
        stage.actor("a ragged row", length, 2 + i * min(LEAVING, len(lengths)) // len(lengths))
        for i, length in enumerate(lengths)
    ]
    if size < 4:
        return [*chosen[:1], *chosen[2:], *chosen[1:2]]
    longest, answered, long, alone = chosen
    half = len(rest) // 2
    return [longest, *rest[:half], alone, *rest[half:], long, answered]


def offsets_and_borders(policy: KVPolicy, size: int, most: int) -> list[int]:
    """Return the lengths of a batch's prompts: pairs of equal ones over the offsets of a page, then the policy's borders."""
    borders = {policy.sink_tokens, policy.recent_tokens, policy.exact_tokens, PAGE_TOKENS, 2 * PAGE_TOKENS}
    if policy.window is not None:
        borders |= {policy.window.tokens, policy.window.tokens + PAGE_TOKENS}
    if policy.eviction is not None:
        kept = policy.eviction.sink_tokens + policy.eviction.heavy_tokens + policy.eviction.window_tokens
        borders |= {kept, kept + PAGE_TOKENS, kept + 2 * PAGE_TOKENS}
    lengths = sorted({border - 1 for border in borders if 1 < border - 1 <= most})[: size // 2]
    rest = size - len(lengths)
    pairs = [1 + (min(most, PAGE_TOKENS) - 1) * (i // 2) * 2 // max(1, rest - 1) for i in range(rest)]
    return [*pairs, *lengths]


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
    fitting = [turn for turn in TURNS if sum(turn) + 9 <= stage.max_tokens]
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
    other = [*stage.draw(chunk), *beginning[chunk:], *stage.draw(5)]
    for number, (role, prompt) in enumerate([*alike, ("a prompt that parts from it and ends alike", other)]):
        actor = stage.actor(role, prompt, STEPS)
        stage.prefill(actor)
        stage.prefixes += 0 < number < len(alike)
        stage.go_on([actor])


SCENES = (
    Scene(batch),
    Scene(equal),
    Scene(turns, (Engine.extend,)),
    Scene(fork, (Engine.fork,)),
    Scene(evicted_fork, (Engine.fork,)),
    Scene(prefix),
    Scene(crowd),
)
