"""What the stress probe does with an engine, part by part, and each decoded token's distance from the twin.

Legend: V = vocab_size, B = rows.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.errors import UserError
from pipeline.core.kv import PAGE_TOKENS, KVPolicy
from pipeline.core.workloads import ProbeConfig
from pipeline.verdict.coverage import Allocation
from stages.engines.base import Logits
from stages.evaluate.decoding.free import behind
from stages.evaluate.decoding.system import allocation
from stages.evaluate.distances.distance import kl_of_rows
from stages.evaluate.twins.twin import Twin

FORK_LENGTHS = (PAGE_TOKENS, PAGE_TOKENS + 1, 2 * PAGE_TOKENS - 1)
"""Tokens at which sequences are forked: no page is copied, nearly nothing of one, nearly all of one."""

STEPS = 4
"""Decode steps of a sequence, where nothing else says how many."""

KINDS = 12
"""Different requests of the load, each of which comes again and again."""


@dataclass(frozen=True)
class Row:
    part: str
    role: str
    length: int
    """Tokens of the sequence, this one included."""
    decoded: int
    """Tokens of it that were decoded, this one included."""
    batch: int
    row: int
    kl: float
    difference: float
    rounding: float | None
    """KL of the twin that is a rounding off, where it was computed: in the part that decodes."""

    @property
    def places(self) -> tuple[str, ...]:
        offset = (self.length - 1) % PAGE_TOKENS
        return f"{self.part}: {self.role}", f"page offset {offset}", f"row {self.row} of a batch of {self.batch}"


@dataclass
class Live:
    """A sequence that is being decoded."""

    part: str
    role: str
    """What its rows share; empty where that is how far they are decoded."""
    tokens: list[int]
    first: int
    """Tokens that were prefilled."""
    exact: Logits
    disturbed: Logits | None = None
    """The twin's rows where it is a rounding off; None where what that costs is not measured."""
    handle: int = -1
    done: int = 0
    """Tokens that were decoded."""

    @property
    def goes_on(self) -> bool:
        return self.first + self.done < len(self.tokens)


@dataclass
class Schedule:
    """One run over all parts, with tokens of its own."""

    engine: Engine
    twin: Twin
    config: ProbeConfig
    max_tokens: int
    batch_sizes: Sequence[int]
    seed: int
    rows: list[Row] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """Contradictions and refusals, which have no distance."""
    largest_rounding: float = 0.0
    """By how much a rounding moved a logit of the twin."""
    started: int = 0
    forks: int = 0
    allocation: Allocation | None = None

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.twin.of(self.engine)

    def parts(self) -> Iterator[tuple[int, int]]:
        """Run the parts, and yield how many of how many have ended, before the first one and after each."""
        parts = [self._context, self._decode, self._batch, self._reuse, self._generate]
        if self.engine.can(Engine.fork):
            parts.append(self._fork)
        yield 0, len(parts)
        for ended, part in enumerate(parts, start=1):
            name = part.__name__.removeprefix("_")
            try:
                part()
            except UserError as error:
                self.failures[f"{name}: the engine refused it: {error}"] += 1
            yield ended, len(parts)

    # --- parts ------------------------------------------------------------------------------------------------------

    def _context(self) -> None:
        """One sequence at a time, over more and more context, at every offset of a page."""
        length = self.max_tokens
        while length >= 2 * PAGE_TOKENS:
            steps = min(self.config.offset_steps, length // 2)
            self._together([self._sequence("context", f"{length:,} tokens", length - steps, steps)])
            length //= 4

    def _decode(self) -> None:
        """Three sequences that decode far from short prompts."""
        steps = min(self.config.decode_steps, self.max_tokens - 32)
        prompts = (1, 9, 30)[: self.batch_sizes[-1]]
        lives = [self._sequence("decode", "", first, steps) for first in prompts]
        self._together(lives)

    def _batch(self) -> None:
        """Ragged batches, up to the largest: the lengths cover the pages' offsets and the policy's borders."""
        for size in self.batch_sizes:
            lengths = _ragged(self.engine.policy, size, self.max_tokens - STEPS)
            self._together([self._sequence("batch", f"size {size}", first, STEPS + (i % 3)) for i, first in enumerate(lengths)])

    def _reuse(self) -> None:
        """Requests that come and go in a full batch, beside a sequence that stays."""
        longest = self.max_tokens - 8
        shapes = [(min(longest, (2, 7, 12, 20, 61, 1)[kind % 6]), (2, 3, 5, 4)[kind % 4]) for kind in range(KINDS)]
        kinds = [
            self._sequence("reuse", f"request of {first} and {steps} tokens, kind {kind}", first, steps)
            for kind, (first, steps) in enumerate(shapes)
        ]
        waiting = [replace(kinds[kind]) for kind in np.random.default_rng(0).integers(0, KINDS, self.config.requests).tolist()]
        batch = next((size for size in self.batch_sizes if size > 1), 1)
        if self.engine.can(Engine.forced_together):
            for begin in range(0, len(waiting), batch):
                self._together(waiting[begin : begin + batch])
            return
        first = self.max_tokens // 2
        steps = min(first, 1 + len(waiting) // (2 * batch))
        staying = [self._sequence("reuse", "a sequence that stays", min(100, first), steps)] if batch > 1 else []
        self._start(staying)
        live: list[Live] = []
        steps = 0
        while waiting or live:
            arrived = waiting[: batch - len(staying) - len(live)]
            waiting = waiting[len(arrived) :]
            self._start(arrived)
            live += arrived
            steps += 1
            self._step([*(stays for stays in staying if steps % 4 == 0 and stays.goes_on), *live])
            live = self._released(live)
        self.engine.release([stays.handle for stays in staying])

    def _generate(self) -> None:
        """Free generation, which one prompt joins: every token must be what forced decode of the answer finds most likely."""
        lengths = [length for length in (5, 66, 21, 12) if length + 40 <= self.max_tokens][: self.batch_sizes[-1]]
        prompts = [self._tokens(length) for length in lengths]
        limits = [min(self.config.decode_steps, self.max_tokens - 5), 40, 1, 8][: len(prompts)]
        answers = self.engine.generate(prompts, limits, None, max_sequences=3)
        self.started += len(prompts)
        for prompt, answer, limit in zip(prompts, answers, limits, strict=True):
            if len(answer) != limit:
                self.failures[f"generate: {len(answer)} tokens instead of {limit}"] += 1
            if len(answer) < 2 or self.twin.compute_dtype is None:  # the first comes from the prompt
                continue
            exact = self.twin.engine.forced([*prompt, *answer[:-1]], len(prompt))
            if (behind(exact, answer[1:]) > 4 * self.largest_rounding + 1e-3).any():
                self.failures["generate: tokens that forced decode of the same answer does not find most likely"] += 1

    def _fork(self) -> None:
        """Forks: both branches go on, the origin goes, its pages are used again, forks are forked and continued by a chunk."""
        engine = self.engine
        if engine.max_sequences is not None and engine.max_sequences < 3:
            return
        for length in FORK_LENGTHS:
            if length + 16 > self.max_tokens:
                return
            prompt = self._tokens(length)
            origin = self._sequence("fork", f"origin forked at {length} tokens", length, STEPS, prompt)
            self._start([origin])
            branch = self._sequence("fork", f"fork at {length} tokens", length, 2 * STEPS, prompt)
            branch.handle = self._forked(origin)
            while origin.goes_on:
                self._step([branch, origin])
            engine.release([origin.handle])
            other = self._sequence("fork", "a new sequence on an origin's pages", length, STEPS)
            self._start([other])
            at = branch.first + branch.done
            cut = self._tokens(9)
            later = self._with_rows(
                "fork", f"a later chunk after {length} tokens", [*prompt, *cut, *self._tokens(STEPS)], length + len(cut), length
            )
            engine.release([other.handle])
            origin = self._sequence("fork", "", length, 0, prompt)
            self._start([origin])
            later.handle = self._forked(origin)
            engine.release([origin.handle])
            engine.extend(later.handle, cut)
            second = self._branch(branch, at)
            second.handle = self._forked(branch)
            while branch.goes_on:
                self._step([second, branch, later] if later.goes_on else [second, branch])
            engine.release([second.handle, branch.handle, later.handle])
        self._fork_of_an_evicting_sequence(engine)

    def _fork_of_an_evicting_sequence(self, engine: Engine) -> None:
        """The origin goes on alone until a page leaves it, a new sequence comes, and the branch still reads that page."""
        lengths = range(PAGE_TOKENS, self.max_tokens - 16)
        first = next((length for length in lengths if engine.policy.evicted_pages(length, engine.shape)), None)
        if first is None:
            return
        length = first - STEPS // 2  # half of the branch's steps come before it loses the page too
        prompt = self._tokens(length)
        origin = self._sequence("fork", f"origin that evicts after {length} tokens", length, STEPS, prompt)
        self._start([origin])
        branch = self._sequence("fork", f"fork at {length} tokens of an origin that evicted", length, STEPS, prompt)
        branch.handle = self._forked(origin)
        while origin.goes_on:
            self._step([origin])
        other = self._sequence("fork", "a new sequence on evicted pages", 2 * PAGE_TOKENS, STEPS)
        self._start([other])
        while branch.goes_on:
            self._step([branch, other])
        engine.release([origin.handle, branch.handle, other.handle])

    def _branch(self, branch: Live, at: int) -> Live:
        """A fork of a fork, with other tokens from `at` on."""
        tokens = [*branch.tokens[:at], *self._tokens(len(branch.tokens) - at)]
        live = self._with_rows("fork", f"a fork of a fork at {at} tokens", tokens, branch.first)
        live.done = branch.done
        return live

    def _forked(self, live: Live) -> int:
        self.forks += 1
        self.started += 1
        return self.engine.fork(live.handle)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, self.engine.vocab_size, count).tolist()
        return tokens

    def _sequence(self, part: str, role: str, first: int, steps: int, prompt: Sequence[int] | None = None) -> Live:
        tokens = [*(self._tokens(first) if prompt is None else prompt), *self._tokens(steps)]
        return self._with_rows(part, role, tokens, first)

    def _with_rows(self, part: str, role: str, tokens: list[int], first: int, chunk: int | None = None) -> Live:
        """Return a sequence with the twin's rows, whose prompt the engine prefills in chunks of other than its usual tokens."""
        oracle = self.twin.engine
        if first == len(tokens):
            return Live(part, role, tokens, first, np.zeros((0, self.engine.vocab_size), np.float32))
        if part == "decode":  # what a rounding costs is measured on short sequences, in which a flipped code weighs most
            replay = self.twin.replay(tokens, [first])
            return Live(part, role, tokens, first, replay.logits, replay.disturbed)
        oracle.prefill_chunk = self.engine.prefill_chunk if chunk is None else chunk
        live = Live(part, role, tokens, first, oracle.forced(tokens, first))
        oracle.prefill_chunk = self.engine.prefill_chunk
        return live

    def _start(self, lives: Sequence[Live]) -> None:
        if lives:
            handles, _ = self.engine.prefill([live.tokens[: live.first] for live in lives])
            self.started += len(lives)
            for live, handle in zip(lives, handles, strict=True):
                live.handle = handle

    def _step(self, lives: Sequence[Live]) -> None:
        """Decode the next token of each sequence, and compare."""
        logits = self.engine.decode([s.handle for s in lives], [s.tokens[s.first + s.done] for s in lives])
        for row, live in enumerate(lives):
            self._compare(live, logits[row], len(lives), row)
        if self.allocation is None:
            self.allocation = allocation(self.engine)

    def _together(self, lives: Sequence[Live]) -> None:
        """Decode sequences together to their ends, and release them."""
        if self.engine.can(Engine.forced_together):
            self.started += len(lives)
            answers = self.engine.forced_together([(live.tokens, live.first) for live in lives])
            for row, (live, logits) in enumerate(zip(lives, answers, strict=True)):
                for logits_V in logits:
                    self._compare(live, logits_V, len(lives), row)
            return
        self._start(lives)
        going = list(lives)
        while going:
            self._step(going)
            going = self._released(going)

    def _released(self, lives: Sequence[Live]) -> list[Live]:
        """Release the sequences that have ended; return the others."""
        self.engine.release([live.handle for live in lives if not live.goes_on])
        return [live for live in lives if live.goes_on]

    def _compare(self, live: Live, logits_V: Logits, batch: int, row: int) -> None:
        exact_V, rounding = live.exact[live.done], None
        if live.disturbed is not None:
            disturbed_V = live.disturbed[live.done]
            self.largest_rounding = max(self.largest_rounding, float(np.abs(disturbed_V - exact_V).max()))
            rounding = kl_of_rows(exact_V, disturbed_V[None])[0]
        role = live.role or f"{live.done // PAGE_TOKENS * PAGE_TOKENS} or more decoded tokens"
        live.done += 1
        difference = float(np.abs(logits_V - exact_V).max())
        kl = kl_of_rows(exact_V, logits_V[None])[0]
        self.rows.append(Row(live.part, role, live.first + live.done, live.done, batch, row, kl, difference, rounding))


def _ragged(policy: KVPolicy, size: int, most: int) -> list[int]:
    """Return the lengths of a batch's prompts: pairs of equal ones over the offsets of a page, then the policy's borders."""
    borders = {policy.sink_tokens, policy.recent_tokens, policy.exact_tokens, PAGE_TOKENS, 2 * PAGE_TOKENS}
    if policy.window is not None:
        borders |= {policy.window.tokens, policy.window.tokens + PAGE_TOKENS}
    if policy.eviction is not None:
        kept = policy.eviction.sink_tokens + policy.eviction.heavy_tokens + policy.eviction.window_tokens
        borders |= {kept, kept + PAGE_TOKENS, kept + 2 * PAGE_TOKENS}
    lengths = sorted({border - 1 for border in borders if 1 < border - 1 <= most})[: size // 2]
    rest = size - len(lengths)
    pairs = np.linspace(1, min(most, PAGE_TOKENS), (rest + 1) // 2).astype(int).repeat(2).tolist()
    return [*pairs[:rest], *lengths]
