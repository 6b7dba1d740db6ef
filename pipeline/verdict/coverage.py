"""What an evaluation exercised: the samples, the stress test, allocated bytes, and free answers.

A verdict holds as far as the engine was exercised. `Exercised` counts where samples are decoded; `Probe` says how far
random tokens took the engine beside its reference engine, the oracle under the same policy.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from pipeline.core.kv import PAGE_TOKENS, whole_pages
from pipeline.verdict.record import Record


@dataclass(config=ConfigDict(extra="forbid"))
class Exercised:
    """What sequences went through on the decode path, counted step by step."""

    longest_context: int = 0
    """Most tokens of a sequence at a decode step, that step's own included."""
    longest_decode: int = 0
    """Most tokens that a sequence had decoded."""
    batch: int = 0
    """Most sequences of a decode step."""
    room: int = 0
    """Most tokens of a sample with the longest answer that was allowed: what an engine is built for to be asked the sample."""
    forks: int = 0
    """Sequences that were forked where they left the reference."""
    shared_prefixes: int = 0
    """Times that a sample continued a fork of a document which was prefilled once."""

    def step(self, prompt: int, position: int, batch: int) -> None:
        """Count a decode step, whose input is the token before `position` of the answer: the first is the prompt's last."""
        self.longest_context = max(self.longest_context, prompt + position)
        self.longest_decode = max(self.longest_decode, position + 1)
        self.batch = max(self.batch, batch)

    @staticmethod
    def merged(parts: "Sequence[Exercised]") -> "Exercised":
        """Return what all of them exercised together."""
        most = ("longest_context", "longest_decode", "batch", "room")
        return Exercised(
            **{name: max((getattr(part, name) for part in parts), default=0) for name in most},
            **{name: sum(getattr(part, name) for part in parts) for name in ("forks", "shared_prefixes")},
        )


class Allocation(Record):
    """Bytes of the cache while the probe held sequences: as allocated, and as the policy claims for what was allocated."""

    pages: int
    pool_bytes: int
    claimed_pool_bytes: int
    exact_bytes: int
    exact_unit_bytes: int
    """What the policy claims for the exact tokens of one sequence: `exact_bytes` is a multiple of it."""
    window_bytes: int
    window_pages: int
    window_unit_bytes: int
    """What the policy claims for the second copy of one page."""
    process: "ProcessMemory | None" = None
    """None where the cache is not this process's, and where the process's memory cannot be read."""

    @property
    def problem(self) -> str | None:
        """What differs; None when bytes are those of the policy."""
        if self.pool_bytes != self.claimed_pool_bytes:
            per_token = [size / max(1, self.pages * PAGE_TOKENS) for size in (self.pool_bytes, self.claimed_pool_bytes)]
            return f"{per_token[0]:.5g} bytes a token are allocated, the policy claims {per_token[1]:.5g}"
        size, unit = self.exact_bytes, self.exact_unit_bytes
        if size % unit if unit else size:
            return f"{size} bytes are allocated for the exact tokens, the policy claims {unit} each"
        if self.window_bytes != (claimed := self.window_pages * self.window_unit_bytes):
            return f"{self.window_bytes} bytes are allocated for the window, the policy claims {claimed}"
        if self.process is not None and self.process.excess_mib and not self.process.unsure:
            return f"the process grows by {self.process.excess_mib:.1f} MiB more than the policy claims for {self.process}"
        return None

    @property
    def unsure(self) -> str | None:
        """Why the process's memory says nothing; None where it does."""
        return self.process.unsure if self.process is not None else None


class ProcessMemory(Record):
    """What the process grew by while sequences were held: an unreported copy of the cache shows there alone."""

    tokens: int
    """Tokens of the sequences."""
    grown_bytes: int
    grown_again_bytes: int
    """What it grew by beyond what the engine reports, when as many were held again."""
    claimed_bytes: int
    """What the policy claims for these sequences; what the engine says that its pool grew by, where that is more."""
    copy_bytes: int
    """What a float16 copy of them would take."""
    noise_bytes: int
    """What the process grew or shrank by while a sequence came and went."""

    @property
    def excess_mib(self) -> float:
        """What no policy explains, half a float16 copy or more; 0 for less."""
        excess = max(self.grown_bytes - self.claimed_bytes, self.grown_again_bytes)
        return excess / (1 << 20) if 2 * excess > self.copy_bytes else 0.0

    @property
    def unsure(self) -> str | None:
        """Why it says nothing; None where it does."""
        if 4 * self.noise_bytes <= self.copy_bytes:
            return None
        noise, copy = (size / (1 << 20) for size in (self.noise_bytes, self.copy_bytes))
        return f"the process's memory moves by {noise:.1f} MiB by itself, too much to see a float16 copy of {copy:.1f} MiB"

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, of which a float16 copy takes {self.copy_bytes / (1 << 20):.1f} MiB"


class Probe(Record):
    """An engine beside the reference engine on random tokens. `failures` name the sequences that deviate, and where."""

    tokens: int
    """Longest sequence."""
    decoded: int
    """Most tokens that a sequence decoded."""
    batch: int
    """Largest decode step."""
    page_offsets: int
    """Offsets within a page at which a token was compared."""
    forks: int
    requests: int
    """Sequences that were started and released."""
    rows: int
    """Decoded tokens and prompts that were compared with the reference engine."""
    failures: list[str]
    allocation: Allocation
    together: int
    """Tokens that several sequences of its largest batch held at once."""
    prompts: int
    """Prompts, and later chunks of them, whose logits were compared."""
    turns: int
    """Later chunks of sequences that had decoded."""
    prefixes: int
    """Prompts that began like one before, on an engine that keeps beginnings."""
    steps: int = 0
    """Decode steps of the engine."""
    preempted: int = 0
    """How often requests gave way in a full pool, and were computed again."""
    seed: int = 0
    """What tokens, lengths and order were drawn from."""

    def __str__(self) -> str:
        counts = (
            *(("forks", self.forks), ("turns", self.turns), ("reused prefixes", self.prefixes)),
            ("preemptions in a full pool", self.preempted),
        )
        also = "".join(f", {count} {name}" for name, count in counts if count)
        prompts = f", {self.prompts} of prompts" if self.prompts else ""
        return (
            f"{self.rows} tokens{prompts} as the oracle computes them, up to {self.tokens:,} tokens, "
            f"{self.decoded} of them decoded, batch {self.batch}, {self.page_offsets} of {PAGE_TOKENS} page offsets{also}, "
            f"{self.requests:,} requests, {self.steps:,} decode steps"
        )


class FreeAnswers(Record):
    """What `generate` says to some samples, beside forced decode of its own words."""

    samples: int
    tokens: int
    contradictions: list[str]
    """The first of each sample that has any."""


class ReusedPrefixes(Record):
    """What an engine answers over prefixes that earlier requests left in its cache, beside what it answers without them."""

    samples: int
    tokens: int
    kl_max: float | None
    """Largest KL of a token's distribution, nats."""
    contradictions: list[str]
    """Samples whose answers differ by more than a tie."""


class Speculated(Record):
    """Answers to the repeated samples, said again by an engine that speculates by itself."""

    requests: int
    same: int
    """Answers that speculation left as they were."""
    tokens: int
    passes: int
    """Of the engine, the prompts' included."""
    counted_passes: int
    """What kvgate counts for the same answers."""
    drafts: int
    """The engine's own counters: proposals, and the tokens that they proposed and that were accepted."""
    drafted: int
    accepted: int


class Deviation(Record):
    """A request that a full pool changed, as far as the engine tells."""

    request: str
    play: int
    kl: float | None
    """Mean of its tokens, nats; null where a logit is not finite."""
    position: int
    """Of the token that changed most."""
    changed: int
    """Tokens of which another one became the likeliest."""
    preempted: int
    reused: int
    """Tokens of its prompt that were taken from the cache."""
    pages: list[int]

    def __str__(self) -> str:
        off = "logits that are not finite" if self.kl is None else f"KL {self.kl:.1e} from itself with room"
        held = ", ".join(map(str, self.pages)) if self.pages else "unknown"
        return (
            f"{self.request} (play {self.play}): {off}, most at position {self.position}, {self.changed} of its tokens "
            f"changed; it gave way {self.preempted} times, reused {self.reused} tokens, held pages {held}"
        )


class Pressure(Record):
    """Requests in a pool that holds a third of them, beside the same requests with room."""

    asked: int
    """Requests of a play."""
    requests: int = 0
    """Requests that were compared, of all plays; 0 for an engine that cannot be put under pressure."""
    pages: int = 0
    """Of the pool."""
    wanted_pages: int = 0
    """Of all requests of a play, if they shared none."""
    preempted: int = 0
    """How often requests gave way and were computed again."""
    reused: int = 0
    """Tokens of prompts that were taken from the cache."""
    limit_kl: float | None = None
    """Largest mean KL of a request from itself with room that is taken for noise, nats."""
    deviations: tuple[Deviation, ...] = ()
    """The worst first."""


class EngineProbes(Record):
    """What random tokens and free answers say of both engines."""

    candidate: Probe | None
    """None where no reference engine could be opened."""
    baseline: Probe | None
    free_candidate: FreeAnswers
    free_baseline: FreeAnswers
    reused_candidate: ReusedPrefixes | None = None
    """None for an engine that reuses no prefixes."""
    reused_baseline: ReusedPrefixes | None = None
    speculated_candidate: Speculated | None = None
    """None for an engine that does not speculate, or without `workloads.speculation.lookup_tokens`."""
    speculated_baseline: Speculated | None = None
    pressure: Pressure | None = None
    """Of the candidate; None where it was not asked for."""


class Limits(Record):
    """How far a verdict holds, or how far a bundle lets its engine go; null is no limit."""

    tokens: int | None = None
    room: int | None = None
    """Tokens that an engine may allow besides, since it had to, to be asked the samples."""
    batch: int | None = None
    decoded: int | None = None
    """Most tokens that a sequence decoded; null without a stress test."""
    acts: tuple[str, ...] = ()
    """What sequences did besides: turns, forks, reused prefixes."""

    @classmethod
    def of_bundle(cls, record: Mapping[str, Any]) -> "Limits":
        """Return what an engine was built for, from its bundle.json: plans, and bundles of engines in other interpreters."""
        return cls(tokens=record.get("max_tokens"), batch=record.get("max_batch"))

    def __str__(self) -> str:
        decoded = f", {self.decoded:,} decoded" if self.decoded is not None else ""
        acts = " and ".join(filter(None, (", ".join(self.acts[:-1]), *self.acts[-1:])))
        return f"up to {self.tokens or 0:,} tokens, batch {self.batch or 0}{decoded}{f', with {acts}' if acts else ''}"

    def exceeded_by(self, bundle: "Limits") -> str | None:
        """Say which limit of a bundle lies beyond; None when none does. Whole pages count."""
        if bundle.tokens is not None and self.tokens is not None:
            covered = whole_pages(max(self.tokens, self.room or 0))
            if bundle.tokens > covered:
                return (
                    f"it was judged {self}, and its bundle allows {bundle.tokens:,} tokens: build it for {covered}, or ask "
                    "samples that long"
                )
        if bundle.batch is not None and self.batch is not None and bundle.batch > self.batch:
            return (
                f"it was judged {self}, and its bundle allows batches of {bundle.batch}: build it for {self.batch}, or raise "
                "workloads.probe.max_batch"
            )
        return None


def covered(samples: Exercised | None, probes: EngineProbes) -> Limits | None:
    """Return how far a verdict holds; None if no sample's steps were recorded.

    Tokens are those of the samples: quality at a length shows on samples of that length alone. A batch changes no quality, so
    that the probe's counts as well, where several of its sequences were as long.
    """
    if samples is None:
        return None
    probe = probes.candidate
    tokens, batch = samples.longest_context, samples.batch
    if probe is None:
        return Limits(tokens=tokens, room=samples.room, batch=batch)
    as_long = whole_pages(probe.together) >= whole_pages(tokens)
    acts = (
        ("turns", probe.turns),
        ("forks", probe.forks + samples.forks),
        ("reused prefixes", probe.prefixes),
        ("a full pool", probe.preempted + (probes.pressure.preempted if probes.pressure is not None else 0)),
    )
    return Limits(
        tokens=tokens,
        room=samples.room,
        batch=max(batch, probe.batch) if as_long else batch,
        decoded=max(samples.longest_decode, probe.decoded),
        acts=tuple(name for name, count in acts if count),
    )
