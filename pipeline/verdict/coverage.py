"""What an evaluation exercised: the samples, the stress probe, allocated bytes, and free answers.

A verdict holds as far as the engine was exercised. `Exercised` counts that where samples are decoded; `Probe` says how far
random tokens took the engine beside its twin, the oracle under the same policy.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.core.kv import PAGE_TOKENS
from pipeline.verdict.record import Record


class Exercised(Record):
    """What went through the decode path. A row is one token of one sequence in one decode step."""

    samples: int
    rows: int
    one_pass_rows: int = 0
    """Scored tokens that the engine computed in one pass, beside the rows."""
    longest_context: int
    """Most tokens of a sequence at a decode step, that step's own included."""
    longest_decode: int
    """Most tokens that a sequence had decoded."""
    batch_sizes: dict[int, int]
    """Sequences of a decode step -> rows of such steps."""
    missing_page_offsets: list[int]
    """Offsets within a page at which no token was decoded."""
    page_borders: int
    """Rows that began a page."""
    shared_prefixes: int
    """Samples that continued a fork of a document which was prefilled once."""
    forks: int
    """Sequences that were forked where they left the reference."""
    chunk_borders: int
    """Borders between chunks of a prefill that prompts crossed."""
    quantized_rows: int
    """Rows whose cache held tokens besides those that the policy keeps exact."""
    beyond_window_rows: int
    """Rows whose cache held tokens that had left the policy's window; 0 without a window."""
    evicted_rows: int = 0
    """Rows whose cache had lost tokens; 0 without eviction."""

    @property
    def largest_batch(self) -> int:
        return max(self.batch_sizes, default=0)

    @staticmethod
    def merged(parts: "Sequence[Exercised]") -> "Exercised":
        """Return what all of them exercised together."""
        sizes: Counter[int] = Counter()
        for part in parts:
            sizes.update(part.batch_sizes)
        missing = [set(part.missing_page_offsets) for part in parts]
        sums = (
            "samples", "rows", "one_pass_rows", "page_borders", "shared_prefixes", "forks", "chunk_borders", "quantized_rows",
            "beyond_window_rows", "evicted_rows",
        )  # fmt: skip
        return Exercised(
            longest_context=max((part.longest_context for part in parts), default=0),
            longest_decode=max((part.longest_decode for part in parts), default=0),
            batch_sizes=dict(sorted(sizes.items())),
            missing_page_offsets=sorted(set.intersection(*missing) if missing else range(PAGE_TOKENS)),
            **{name: sum(getattr(part, name) for part in parts) for name in sums},
        )


class Cell(Record):
    """What the samples of a workload in a context bin [low, high) exercised."""

    workload: str
    context: tuple[int, int | None]
    exercised: Exercised


class Coverage(Record):
    """What the samples of an evaluation exercised, and its repetitions for the noise floor."""

    overall: Exercised
    cells: list[Cell]

    @staticmethod
    def merged(parts: "Sequence[Coverage]") -> "Coverage":
        """Return the coverage of several rounds."""
        cells: dict[tuple[str, tuple[int, int | None]], list[Exercised]] = {}
        for part in parts:
            for cell in part.cells:
                cells.setdefault((cell.workload, cell.context), []).append(cell.exercised)
        return Coverage(
            overall=Exercised.merged([part.overall for part in parts]),
            cells=[
                Cell(workload=workload, context=context, exercised=Exercised.merged(cells[workload, context]))
                for workload, context in sorted(cells, key=lambda key: (key[0], key[1][0]))
            ],
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
    window_unit_bytes: int
    """What the policy claims for the second copy of one page."""

    @property
    def problem(self) -> str | None:
        """What differs; None when bytes are those of the policy."""
        if self.pool_bytes != self.claimed_pool_bytes:
            per_token = [size / max(1, self.pages * PAGE_TOKENS) for size in (self.pool_bytes, self.claimed_pool_bytes)]
            return f"{per_token[0]:.5g} bytes a token are allocated, the policy claims {per_token[1]:.5g}"
        for what, size, unit in (
            ("exact tokens", self.exact_bytes, self.exact_unit_bytes),
            ("window", self.window_bytes, self.window_unit_bytes),
        ):
            if size % unit if unit else size:
                return f"{size} bytes are allocated for the {what}, the policy claims multiples of {unit}"
        return None


class ProbePart(Record):
    """One part of a probe."""

    name: str
    rows: int
    """Decoded tokens that were compared with the twin."""
    kl_median: float | None
    kl_max: float | None
    largest_difference: float | None
    """Of any logit."""


class Probe(Record):
    """An engine beside its twin on random tokens. `failures` name the places at which it deviates."""

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
    engine_tokens: int | None
    """Tokens of a sequence that the engine itself allows; null where nothing of its own limits it."""
    engine_batch: int | None
    runs: int
    """Runs with other tokens: a place fails that deviates in each of them."""
    limit_kl: float
    limit_single_kl: float
    parts: list[ProbePart]
    failures: list[str]
    allocation: Allocation
    seconds: float

    def __str__(self) -> str:
        forks = f", {self.forks} forks" if self.forks else ""
        return (
            f"{sum(part.rows for part in self.parts)} tokens as the oracle computes them, up to {self.tokens:,} tokens, "
            f"{self.decoded} of them decoded, batch {self.batch}, {self.page_offsets} of {PAGE_TOKENS} page offsets{forks}, "
            f"{self.requests:,} requests"
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


class EngineProbes(Record):
    """What random tokens and free answers say of both engines. Reports from before it lack it."""

    candidate: Probe | None
    """None where no twin could be opened."""
    baseline: Probe | None
    free_candidate: FreeAnswers
    free_baseline: FreeAnswers
    reused_candidate: ReusedPrefixes | None = None
    """None for an engine that reuses no prefixes."""
    reused_baseline: ReusedPrefixes | None = None


class Limits(Record):
    """How far a verdict holds, or how far a bundle lets its engine go; null is no limit."""

    tokens: int | None = None
    batch: int | None = None

    @classmethod
    def of_bundle(cls, record: Mapping[str, Any]) -> "Limits":
        """Return what an engine was built for, from its bundle.json: plans of TensorRT, and TensorRT-LLM, have limits."""
        return cls(tokens=record.get("max_tokens"), batch=record.get("max_batch"))

    def __str__(self) -> str:
        return f"up to {self.tokens or 0:,} tokens, batch {self.batch or 0}"

    def exceeded_by(self, bundle: "Limits") -> str | None:
        """Say which limit of a bundle lies beyond; None when none does. Whole pages count, since their offsets were visited."""
        if bundle.tokens is not None and self.tokens is not None:
            covered = -(-self.tokens // PAGE_TOKENS) * PAGE_TOKENS
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


def covered(coverage: Coverage | None, probes: EngineProbes | None) -> Limits | None:
    """Return how far a verdict holds; None for reports that do not say.

    Tokens are those of the samples: quality at a length shows on samples of that length alone. A batch changes no quality, so
    that the probe's counts as well.
    """
    if coverage is None:
        return None
    probe = probes.candidate if probes is not None else None
    batch = max(coverage.overall.largest_batch, probe.batch if probe is not None else 0)
    return Limits(tokens=coverage.overall.longest_context, batch=batch)
