"""An engine beside its twin: what sequences do on the engine, and how far each of their logits is from the twin's.

The engine plays first and the twin computes all of a scene's sequences together then, which costs a few passes.

Legend: V = vocab_size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS
from pipeline.core.workloads import ProbeConfig
from pipeline.verdict.coverage import Allocation
from stages.engines.base import Logits
from stages.engines.oracle.attention import Fed
from stages.evaluate.decoding.free import behind
from stages.evaluate.decoding.system import allocation
from stages.evaluate.distances.distance import kl_of_logits
from stages.evaluate.twins.twin import Twin

NOT_KEPT: Logits = np.zeros(0, np.float32)
"""In place of logits that were compared."""

PASS_TOKENS = 4096
"""Most tokens of one pass of the twin, unless one sequence has more."""


@dataclass(frozen=True)
class Shown:
    """Logits that the engine gave, and where."""

    logits_V: Logits
    length: int
    """Tokens of the sequence, this one included."""
    decoded: int
    """Tokens of it that were decoded, this one included; 0 for a prompt's last token."""
    batch: int
    row: int


@dataclass(frozen=True)
class Row:
    """One of them beside the twin."""

    part: str
    role: str
    shown: Shown
    kl: float
    difference: float
    rounding: float | None
    """KL of the twin that is a rounding off, where it was computed."""
    scene: str

    @property
    def places(self) -> tuple[str, ...]:
        shown = self.shown
        if not shown.decoded:
            pages = 1 << (shown.length // PAGE_TOKENS).bit_length() >> 1
            return (
                f"{self.part}: {self.role}, prompt",
                f"prompts of {pages} or more pages",
                f"row {shown.row} of {shown.batch} prompts",
            )
        offset = (shown.length - 1) % PAGE_TOKENS
        own = f"{self.part}: {self.role}"
        if self.part == "far":
            own += f", {shown.decoded // PAGE_TOKENS * PAGE_TOKENS} or more decoded tokens"
        return own, f"page offset {offset}", f"{self.part}: row {shown.row} of a batch of {shown.batch}"


@dataclass(eq=False)
class Actor:
    """A sequence on the stage."""

    role: str
    """What its rows share, in a failure's words."""
    prompt: list[int]
    ahead: list[int] = field(default_factory=list)
    """Tokens that it is going to be fed."""
    part: str = ""
    measured: bool = False
    """Whether what a rounding costs is measured on it."""
    handle: int = -1
    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[int, bool]] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    """What `generate` answers to its prompt; its first decoded tokens, if it decodes any."""

    @property
    def decoded(self) -> int:
        return sum(count for count, decoded in self.pieces if decoded)

    def take(self, tokens: Sequence[int], *, decoded: bool) -> None:
        self.tokens += tokens
        if decoded and self.pieces and self.pieces[-1][1]:
            self.pieces[-1] = (self.pieces[-1][0] + len(tokens), True)
        else:
            self.pieces.append((len(tokens), decoded))

    @property
    def fed(self) -> Fed:
        if self.tokens:
            return Fed(self.tokens, self.pieces)
        return Fed([*self.prompt, *self.ahead], [(len(self.prompt), False), (len(self.ahead), True)])


@dataclass
class Stage:
    """One run over all scenes, with tokens of its own."""

    engine: Engine
    twin: Twin
    config: ProbeConfig
    max_tokens: int
    largest: int
    """Sequences of the largest batch."""
    claimed: int
    """Tokens of the longest sample."""
    seed: int
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What needs no second run: contradictions, refusals, and the influence of other requests."""
    rounding: float = 0.0
    """By how much a rounding moved a logit of the twin."""
    started: int = 0
    forks: int = 0
    turns: int = 0
    """Later chunks of sequences that had decoded."""
    reused: int = 0
    """Prompts that began like one before, on an engine that keeps prefixes."""
    together: int = 0
    """Tokens that at least two sequences of the largest batch had."""
    allocation: Allocation | None = None
    playing: list[Actor] = field(default_factory=list)
    """The actors of this scene that the twin has not computed."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.twin.of(self.engine)

    # --- acts -------------------------------------------------------------------------------------------------------

    def draw(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, self.engine.vocab_size, count).tolist()
        return tokens

    def actor(self, role: str, prompt: int | Sequence[int], steps: int = 0, **options: object) -> Actor:
        """Return a sequence of a prompt, of so many random tokens or of these, that will be fed as many random ones."""
        tokens = self.draw(prompt) if isinstance(prompt, int) else list(prompt)
        return Actor(role, tokens, self.draw(steps), **options)  # type: ignore[arg-type]

    def prefill(self, *actors: Actor) -> None:
        """Start sequences together."""
        handles, logits = self.engine.prefill([actor.prompt for actor in actors])
        self.started += len(actors)
        for row, (actor, handle) in enumerate(zip(actors, handles, strict=True)):
            actor.handle = handle
            actor.take(actor.prompt, decoded=False)
            actor.shown.append(Shown(logits[row].copy(), len(actor.tokens), 0, len(actors), row))
        self.playing += actors

    def decode(self, *actors: Actor, steps: int = 1) -> None:
        """Decode the next token of each, so many times."""
        for _ in range(steps):
            tokens = [actor.ahead.pop(0) if actor.ahead else self.draw(1)[0] for actor in actors]
            logits = self.engine.decode([actor.handle for actor in actors], tokens)
            for row, (actor, token) in enumerate(zip(actors, tokens, strict=True)):
                actor.take([token], decoded=True)
                actor.shown.append(Shown(logits[row].copy(), len(actor.tokens), actor.decoded, len(actors), row))
            if self.allocation is None:
                self.allocation = allocation(self.engine)

    def extend(self, actor: Actor, count: int) -> None:
        """Append a later chunk of a prompt."""
        tokens = self.draw(count)
        logits_V = self.engine.extend(actor.handle, tokens)
        self.turns += actor.decoded > 0
        actor.take(tokens, decoded=False)
        actor.shown.append(Shown(np.array(logits_V), len(actor.tokens), 0, 1, 0))

    def fork(self, actor: Actor, role: str, steps: int = 0) -> Actor:
        """Start another sequence with the same tokens."""
        branch = replace(
            actor, role=role, tokens=list(actor.tokens), pieces=list(actor.pieces), shown=[], ahead=self.draw(steps)
        )
        branch.handle = self.engine.fork(actor.handle)
        self.forks += 1
        self.started += 1
        self.playing.append(branch)
        return branch

    def leave(self, *actors: Actor) -> None:
        self.engine.release([actor.handle for actor in actors])
        for actor in actors:
            actor.handle = -1

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
        lengths = [len(actor.tokens) for actor in live]
        due = sum(policy.kept_pages(length, shape) + policy.window_pages(length) for length in lengths)
        held = 0 if self.engine.keeps_prefixes else self.engine.memory().held_pages
        if held > due + len(live):  # a page may leave a step later
            self.failures.append(
                f"sequences of {', '.join(map(str, lengths))} tokens hold {held} pages, the policy claims {due}"
            )

    def _in_requests(self, actors: Sequence[Actor]) -> None:
        """What `play` does on an engine of whole requests."""
        self.prefill(*actors)
        self.leave(*actors)
        answers = self.engine.forced_together([([*actor.prompt, *actor.ahead], len(actor.prompt)) for actor in actors])
        for row, (actor, logits) in enumerate(zip(actors, answers, strict=True)):
            for token, logits_V in zip(actor.ahead, logits, strict=True):
                actor.take([token], decoded=True)
                actor.shown.append(Shown(logits_V, len(actor.tokens), actor.decoded, len(actors), row))
            actor.ahead = []
        if len(actors) == self.largest:
            self.together = max(self.together, sorted(len(actor.tokens) for actor in actors)[-2:][0])

    # --- the twin ---------------------------------------------------------------------------------------------------

    def compare(self, part: str) -> None:
        """End a scene: compare what its actors showed and said with the twin."""
        actors, self.playing = self.playing, []
        for measured in (True, False):
            group = [actor for actor in actors if (actor.measured or self.twin.measures) is measured]
            for together in _passes(group):
                rounding = self.twin.rounding if measured else 0.0
                exact, disturbed = self.twin.engine.rows([actor.fed for actor in together], rounding)
                for i, actor in enumerate(together):
                    self.note(part, actor, exact[i], disturbed[i] if measured else None)
        for actor in actors:
            if actor.handle >= 0:  # a scene that the engine refused in its middle
                self.leave(actor)

    def exact(self, actors: Sequence[Actor]) -> list[Logits]:
        """Return the twin's rows of sequences that are to be played: of their prompts, and of all that they will be fed."""
        found: dict[int, Logits] = {}
        for together in _passes(actors):
            rows, _ = self.twin.engine.rows([actor.fed for actor in together])
            found |= {id(actor): row for actor, row in zip(together, rows, strict=True)}
        return [found[id(actor)] for actor in actors]

    def note(self, part: str, actor: Actor, exact: Logits, disturbed: Logits | None = None) -> None:
        """Note how far what an actor showed is from the twin's rows (rows, V), and whether what it said is the likeliest."""
        if disturbed is not None:
            self.rounding = max(self.rounding, float(np.abs(disturbed - exact).max()))
        first = len(exact) - len(actor.shown)
        for i, shown in enumerate(actor.shown, start=first):
            row = exact[i][None]
            kl = kl_of_logits(row, shown.logits_V[None]).item()
            rounding = None if disturbed is None else kl_of_logits(row, disturbed[i][None]).item()
            difference = float(np.abs(shown.logits_V - exact[i]).max())
            if not np.isfinite(kl):
                self.failures.append(f"{part}: {actor.role}: logits are not finite at position {shown.length - 1}")
            kept = replace(shown, logits_V=NOT_KEPT)
            self.rows.append(Row(actor.part or part, actor.role, kept, kl, difference, rounding, part))
        if actor.said and self.twin.compute_dtype is not None:
            gaps = behind(exact[: len(actor.said)], actor.said)
            wrong = np.flatnonzero(~(gaps <= 4 * self.rounding + 1e-3))
            if wrong.size:
                what = "the first token" if wrong[0] == 0 else f"token {wrong[0]}"
                self.failures.append(
                    f"generate: {what} of the answer to a prompt of {len(actor.prompt)} tokens ({actor.role}) lies "
                    f"{gaps[wrong[0]]:.2g} (logits) behind what the prompt and the answer before it make most likely"
                )


def _passes(actors: Sequence[Actor]) -> list[list[Actor]]:
    """Group sequences into passes."""
    groups: list[list[Actor]] = []
    tokens = 0
    for actor in actors:
        tokens += len(actor.fed.tokens)
        if not groups or tokens > PASS_TOKENS:
            groups.append([])
            tokens = len(actor.fed.tokens)
        groups[-1].append(actor)
    return groups
