"""An engine beside the reference engine on random tokens: what sequences do, and whether the engine keeps to its policy there.

The engine goes first. What it stored of a sequence is looked at before it is freed, and the reference engine replays the
sequences of a scenario together over these codes.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS
from pipeline.core.workloads import ProbeConfig
from pipeline.verdict.conformance import ComparedRequest, Distance
from pipeline.verdict.coverage import Allocation
from pipeline.verdict.record import or_infinite
from stages.engines.base import Logits
from stages.engines.oracle.attention import Fed
from stages.engines.oracle.replay import Replay
from stages.evaluate.decoding.free import behind, contradiction
from stages.evaluate.decoding.system import allocation
from stages.evaluate.distances.distance import Array
from stages.evaluate.twins.deviation import first_deviation
from stages.evaluate.twins.request import Compared, Request, far_medians, loses_pages, passes, problem_of
from stages.evaluate.twins.twin import Twin

WORST_SHARE = 1 / 8
"""A rounding costs at least this part of what it costs in the worst sequence of the run: sound engines show 65 times its KL."""
UNUSUAL = 30.0
"""Without a rounding to go by: how many times the median sequence's mean KL another sequence's may be ..."""
UNUSUAL_KL = 0.02
"""... and the mean KL that is always allowed then, in nats."""

Distances = tuple[float, float, float]
"""Mean KL of an engine; mean and largest KL of a rounding."""


@dataclass(eq=False)
class Actor:
    """A sequence of a scenario."""

    role: str
    """Its name in failures."""
    prompt: list[int]
    ahead: list[int] = field(default_factory=list)
    """Tokens that it is going to be fed."""
    watched: bool = True
    """Whether it is compared."""
    handle: int = -1
    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[int, bool]] = field(default_factory=list)
    request: Request = field(default_factory=lambda: Request(""))

    @property
    def decoded(self) -> int:
        return sum(count for count, decoded in self.pieces if decoded)

    @property
    def fed(self) -> Fed:
        return Fed(self.tokens, self.pieces)

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[tuple[int, bool], ...]]:
        """What a rounding costs depends on the tokens, and on how they came."""
        return tuple(self.tokens), tuple(self.pieces)


@dataclass
class Stage:
    """One run over all scenarios."""

    engine: Engine
    twin: Twin
    config: ProbeConfig
    max_tokens: int
    largest: int
    """Sequences of the largest batch."""
    claimed: int
    """Tokens of the longest sample."""
    limit: float
    """Roundings that a sequence may be off, as a request of the forced decode."""
    layers: tuple[float, ...] = ()
    """Errors of the layers that the 16-bit engine stores, where a rounding is measured."""
    seed: int = 0
    scene: str = ""
    """The scenario that runs."""
    failures: list[str] = field(default_factory=list)
    """Contradictions, refusals, and the influence of other requests."""
    records: list[ComparedRequest] = field(default_factory=list)
    roundings: dict[Any, Distance] = field(default_factory=dict)
    """What a rounding costs, by the key of the sequence on which it was measured."""
    kl: dict[str, list[Array]] = field(default_factory=lambda: defaultdict(list))
    """KL of each row, by scenario and role, for an engine whose logits are judged by medians."""
    suspects: list[tuple[Request, Compared]] = field(default_factory=list)
    """Compared sequences that are farther off than allowed, unless all are."""
    requests: int = 0
    forks: int = 0
    turns: int = 0
    """Later chunks of sequences that had decoded."""
    prefixes: int = 0
    """Prompts that began like one before, on an engine that keeps prefixes."""
    together: int = 0
    """Tokens that at least two sequences of the largest batch had."""
    tokens: int = 0
    decoded: int = 0
    batch: int = 0
    rows: int = 0
    steps: int = 0
    """Decode steps of the engine."""
    preempted: int = 0
    """How often requests gave way in a full pool."""
    idle: float = 0.0
    """Longest time in seconds that the engine was left alone while a sequence was live."""
    resting: Actor | None = None
    """A sequence that lives through all scenarios, and decodes a token after each."""
    prompts: int = 0
    """Rows of prompts and later chunks among them."""
    offsets: set[int] = field(default_factory=set)
    allocation: Allocation | None = None
    playing: list[Actor] = field(default_factory=list)
    ended: list[Actor] = field(default_factory=list)
    """Sequences that left and were not compared yet."""
    answers: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    """Role, prompt and answer of `generate`, not checked yet."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.twin.of(self.engine)
        self.loses = loses_pages(self.engine)
        self.by_median = self.twin.measures or self.twin.compute_dtype is None

    # --- acts -------------------------------------------------------------------------------------------------------

    def draw(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, self.engine.vocab_size, count).tolist()
        return tokens

    def length(self, least: int, most: int) -> int:
        """Draw a length, both ends included."""
        return int(self.rng.integers(least, most + 1))

    def actor(self, role: str, prompt: int | Sequence[int], steps: int = 0) -> Actor:
        """Return a sequence of a prompt, of so many random tokens or of these, that will be fed as many random ones."""
        tokens = self.draw(prompt) if isinstance(prompt, int) else list(prompt)
        return Actor(role, tokens, self.draw(steps))

    def prefill(self, *actors: Actor) -> None:
        """Start sequences together."""
        handles, logits = self.engine.prefill([actor.prompt for actor in actors])
        self.requests += len(actors)
        for row, (actor, handle) in enumerate(zip(actors, handles, strict=True)):
            actor.handle = handle
            self._take(actor, actor.prompt, logits[row], row, len(actors), decoded=False)
        self.playing += actors
        self._look(actors if self.loses else ())

    def _take(self, actor: Actor, tokens: Sequence[int], logits_V: Logits, row: int, batch: int, *, decoded: bool) -> None:
        """Append tokens to a sequence, and the logits that the engine gave after them in a row of a batch."""
        actor.tokens += tokens
        if decoded and actor.pieces[-1][1]:
            actor.pieces[-1] = (actor.pieces[-1][0] + len(tokens), True)
        else:
            actor.pieces.append((len(tokens), decoded))
        actor.request.row(logits_V, len(actor.tokens) - 1, (row, batch))
        if actor.watched:
            self.tokens, self.rows = max(self.tokens, len(actor.tokens)), self.rows + 1
            self.prompts += not decoded
            if decoded:
                self.decoded, self.batch = max(self.decoded, actor.decoded), max(self.batch, batch)
                self.offsets.add((len(actor.tokens) - 1) % PAGE_TOKENS)

    def decode(self, *actors: Actor, steps: int = 1) -> None:
        """Decode the next token of each, so many times."""
        for _ in range(steps):
            tokens = [actor.ahead.pop(0) if actor.ahead else self.draw(1)[0] for actor in actors]
            logits = self.engine.decode([actor.handle for actor in actors], tokens)
            self.steps += 1
            for row, (actor, token) in enumerate(zip(actors, tokens, strict=True)):
                self._take(actor, [token], logits[row], row, len(actors), decoded=True)
            self._look([actor for actor in actors if self.loses and (len(actor.tokens) + 1) % PAGE_TOKENS == 0])
            if self.allocation is None:
                self.allocation = allocation(self.engine)

    def extend(self, actor: Actor, count: int) -> None:
        """Append a later chunk of a prompt."""
        tokens = self.draw(count)
        self._look([actor] if self.loses else ())
        logits_V = self.engine.extend(actor.handle, tokens)
        self.turns += actor.decoded > 0
        self._take(actor, tokens, logits_V, 0, 1, decoded=False)
        self._look([actor] if self.loses else ())

    def fork(self, actor: Actor, role: str, steps: int = 0) -> Actor:
        """Start another sequence with the same tokens."""
        branch = replace(
            actor, role=role, tokens=list(actor.tokens), pieces=list(actor.pieces), request=Request(""), ahead=self.draw(steps)
        )
        branch.request.look(actor.request.layers)
        branch.handle = self.engine.fork(actor.handle)
        self.forks += 1
        self.requests += 1
        self.playing.append(branch)
        return branch

    def ask(
        self, actors: Sequence[Actor], limits: Sequence[int], stops: Sequence[int] = (), at_once: int | None = None
    ) -> list[list[int]]:
        """Let the engine answer prompts freely, and return the answers. Their tokens are checked when the scenario ends.

        Of several stop tokens the last one is expected.
        """
        at_once = at_once or self.largest
        answers = self.engine.generate([actor.prompt for actor in actors], limits, stops, max_sequences=at_once)
        self.requests += len(actors)
        for actor, answer, limit in zip(actors, answers, limits, strict=True):
            stopped = [] if len(answer) >= limit else list(stops[-1:])
            if (len(answer) + len(stopped) < limit and not stopped) or len(answer) > limit:
                self._fail_answer(actor, f"{len(answer)} tokens instead of {limit}")
            if not set(answer).isdisjoint(stops):
                self._fail_answer(actor, "the stop token, and more,")
            if answer or stopped:
                self.answers.append((actor.role, actor.prompt, [*answer, *stopped]))
        return [list(answer) for answer in answers]

    def _fail_answer(self, actor: Actor, what: str) -> None:
        self.failures.append(f"generate: {what} to a prompt of {len(actor.prompt)} tokens")

    def leave(self, *actors: Actor) -> None:
        self._look(actors)
        self.engine.release([actor.handle for actor in actors])
        for actor in actors:
            actor.handle = -1
            self.playing.remove(actor)
        self.ended += [actor for actor in actors if actor.watched]

    def _look(self, actors: Sequence[Actor]) -> None:
        """Look at what the engine stored of sequences that leave, or that may give pages back with their next token."""
        for actor in actors if self.engine.can(Engine.stored) else ():
            if actor.watched:
                actor.request.look(self.engine.stored(actor.handle))

    def play(self, actors: Sequence[Actor]) -> None:
        """Start sequences together and decode each to its end, when it leaves; the first one a step alone, a batch of one."""
        if self.engine.can(Engine.forced_together):
            self._in_requests(actors)
            return
        self.prefill(*actors)
        self.decode(actors[0])
        self.go_on(actors)

    def go_on(self, actors: Sequence[Actor]) -> None:
        """Decode sequences together, each to its end, when it leaves."""
        going = list(actors)
        while going:
            if len(going) == self.largest:
                self.together = max(self.together, sorted(len(actor.tokens) + 1 for actor in going)[-2:][0])
            self.decode(*going)
            if not any(actor.ahead for actor in going):
                self._weigh(going)
            self.leave(*(actor for actor in going if not actor.ahead))
            going = [actor for actor in going if actor.ahead]

    def _weigh(self, live: Sequence[Actor]) -> None:
        """Note pages that the policy gave back, and that the only live sequences still hold."""
        policy, shape = self.engine.policy, self.engine.shape
        lengths = [len(actor.tokens) for actor in (*live, *([self.resting] if self.resting else ()))]
        due = sum(policy.kept_pages(length, shape) + policy.window_pages(length) for length in lengths)
        held = 0 if self.engine.keeps_prefixes else self.engine.memory().held_pages
        if held > due + len(live):  # a page may leave a step later
            self.failures.append(
                f"sequences of {', '.join(map(str, lengths))} tokens hold {held} pages, the policy claims {due}"
            )

    def _in_requests(self, actors: Sequence[Actor]) -> None:
        """What `play` does on an engine of whole requests."""
        self.prefill(*actors)
        self.engine.release([actor.handle for actor in actors])
        answers = self.engine.forced_together([([*actor.prompt, *actor.ahead], len(actor.prompt)) for actor in actors])
        for row, (actor, logits) in enumerate(zip(actors, answers, strict=True)):
            for token, logits_V in zip(actor.ahead, logits, strict=True):
                self._take(actor, [token], logits_V, row, len(actors), decoded=True)
            if actor.watched and self.engine.can(Engine.stored_request):
                actor.request.look(self.engine.stored_request(row))
            actor.handle, actor.ahead = -1, []
            self.playing.remove(actor)
        self.ended += [actor for actor in actors if actor.watched]
        if len(actors) == self.largest:
            self.together = max(self.together, sorted(len(actor.tokens) for actor in actors)[-2:][0])

    # --- the reference engine -----------------------------------------------------------------------------------------

    def end(self) -> None:
        """End a scenario: release the sequences that a refusal left, and compare while the engine is idle."""
        self.leave(*[actor for actor in self.playing if actor.handle >= 0 and actor is not self.resting])
        started = time.monotonic()
        self.compare()
        self.idle = max(self.idle, time.monotonic() - started)
        self._check_answers()

    def compare(self, least: int = 0) -> None:
        """Compare the sequences that have ended with the reference engine, once they have `least` tokens."""
        ended = [actor for actor in self.ended if actor.request.logits]
        if sum(len(actor.tokens) for actor in ended) < least:
            return
        self.ended, by_codes = [], defaultdict[Any, list[Actor]](list)
        for actor in ended:
            by_codes[actor.key, actor.request.digest].append(actor)
        alike = {actors[0]: actors for actors in by_codes.values()}
        fresh = list({actor.key: actor for actor in alike if actor.key not in self.roundings}.values())
        again = [actor for actor in alike if actor not in fresh]
        for group in [*passes(fresh), *passes(again)]:
            policy, shape = self.engine.policy, self.engine.shape
            problems = [problem_of(actor.request.layers, policy, shape, len(actor.tokens)) for actor in group]
            caches = [[] if wrong else actor.request.layers for actor, wrong in zip(group, problems, strict=True)]
            replays = self.twin.replay([actor.fed for actor in group], caches, disturbed=group[0].key not in self.roundings)
            for first, replay, problem in zip(group, replays, problems, strict=True):
                for actor in alike[first]:
                    self._note(actor, replay, problem)

    def _note(self, actor: Actor, replay: Replay, problem: str) -> None:
        request = actor.request
        request.name = f"{self.scene}: {actor.role}"
        compared = request.compared(
            replay.tail(len(request.logits)), len(actor.prompt), actor.decoded, self.engine.policy, problem
        )
        if self.twin.measures and any(compared.errors):
            compared = compared.by_layer(self.layers)
        rounding = self.roundings.setdefault(actor.key, compared.record.rounding)
        compared = replace(compared, record=compared.record.model_copy(update={"rounding": rounding}))
        self.records.append(compared.record)
        if self.by_median:
            self.kl[request.name].append(compared.kl)
        if self._times_allowed(compared) > 1:
            self.suspects.append((replace(request, logits=[], layers=[]), compared))

    def _times_allowed(self, compared: Compared, usual: Distances = (0.0, 0.0, 0.0)) -> float:
        """Return how many times as far off as allowed a sequence is, where these distances are `usual` in the run.

        The rule is conformance's, but a rounding costs at least the `usual`: few tokens may be lucky. Roundings say nothing if
        a float32 engine does not show its cache, where one number that rounds to another code outweighs them: such sequences
        are held to the median one. Logits that are judged by medians need only be finite here.
        """
        record, own, (kl, mean, largest) = compared.record, compared.record.rounding, usual
        if self.by_median and record.engine.kl_max is not None:
            finite_logits = record.engine.model_copy(update={"kl_mean": 0.0, "kl_max": 0.0})
            return record.model_copy(update={"engine": finite_logits}).times_allowed(self.limit)
        if not (record.problem or self.by_median or any(compared.errors)):
            return or_infinite(record.engine.kl_mean) / max(UNUSUAL_KL, UNUSUAL * kl)
        widened = {"kl_mean": max(or_infinite(own.kl_mean), mean), "kl_max": max(or_infinite(own.kl_max), largest)}
        return record.model_copy(update={"rounding": own.model_copy(update=widened)}).times_allowed(self.limit)

    def deviations(self) -> Iterator[str]:
        """Yield the sequences that deviate, the worst first: one of each name."""
        # A rounding costs much in a few sequences: attention hangs on one number, or an exact token, not shown, rounds.
        known = [(one.kl_mean or 0.0, one.kl_max or 0.0) for one in self.roundings.values()] or [(0.0, 0.0)]
        mean, largest = WORST_SHARE * np.max(known, axis=0)
        kl = np.median([or_infinite(record.engine.kl_mean) for record in self.records] or [0.0])
        usual = float(kl), float(mean), float(largest)
        suspects = ((self._times_allowed(compared, usual), request, compared) for request, compared in self.suspects)
        ranked = sorted(suspects, key=lambda suspect: -suspect[0])
        names = Counter(request.name for times, request, _ in ranked if times > 1)
        for name, count in names.items():
            times, request, compared = next(suspect for suspect in ranked if suspect[1].name == name)
            kl_max, problem = compared.record.engine.kl_max, compared.record.problem
            off = "logits are not finite" if kl_max is None else f"KL up to {kl_max:.1e} from the oracle"
            more = f"; and {count - 1} more such" if count > 1 else ""
            place = problem or first_deviation(request, compared, self.limit).told()
            yield f"{name}: {place}, {off}, {times:.2g} times as far as allowed{more}"
        if self.kl and self.twin.compute_dtype is None:
            usual_row = float(np.median(np.concatenate(list(chain(*self.kl.values())))))
            yield from far_medians(self.kl, max(UNUSUAL_KL, UNUSUAL * usual_row))
        elif self.kl:
            yield from far_medians(self.kl, self.limit**2 * float(np.median(known, axis=0)[0]))

    def _check_answers(self) -> None:
        """Check that every token of `generate` is the likeliest but for rounding, over the reference engine's own codes.

        One number that rounds to another code may change an answer: what looks wrong is forced on the engine, too.
        """
        answers, self.answers = self.answers, []
        if self.twin.compute_dtype is None:
            return
        feds = [Fed(prompt + said[:-1], [(len(prompt), False), (len(said) - 1, True)]) for _, prompt, said in answers]
        replays = [one for group in passes(feds) for one in self.twin.replay(group)]
        rounding = max((float(np.abs(one.disturbed - one.logits).max()) for one in replays), default=0.0)
        for (role, prompt, said), replay in zip(answers, replays, strict=True):
            if (behind(replay.logits, said) <= 4 * rounding + 1e-3).all():
                continue
            found = contradiction(self.engine, self._forced(role, prompt, said), said)
            if found is not None:
                what = "the first token" if found[0] == 0 else f"token {found[0]}"
                self.failures.append(
                    f"generate: {what} of the answer to a prompt of {len(prompt)} tokens ({role}) lies {found[1]:.2g} (logits) "
                    "behind what the prompt and the answer before it make most likely"
                )
        self.compare()

    def _forced(self, role: str, prompt: list[int], said: list[int]) -> Logits:
        """Return what the engine itself finds likely at each token of an answer; the sequence is compared as others are."""
        actor = Actor(f"{role}, forced", prompt, said[:-1])
        if self.engine.can(Engine.forced_together) and actor.ahead:
            self.play([actor])
        else:
            self.prefill(actor)
            self.decode(actor, steps=len(actor.ahead))
            self.leave(actor)
        return np.stack(actor.request.logits)
