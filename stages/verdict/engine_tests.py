"""Results of an engine's tests beyond the scored samples: stress test, allocated bytes, free answers, full pool."""

from stages.core.records import Record
from stages.policies.policy import PAGE_TOKENS


class Allocation(Record):
    """Comparison of the cache's allocated bytes with the policy's claim, while the stress test held sequences."""

    difference: str | None = None
    """First difference in the bytes that the engine reports; None if they match the policy."""


class StressResult(Record):
    """The stress test: an engine compared with its reference engine on random tokens."""

    failures: list[str]
    """Descriptions of the sequences that deviate, with the position of the deviation."""
    allocation: Allocation
    tokens: int = 0
    """Tokens of the longest sequence."""
    decoded: int = 0
    batch: int = 0
    page_offsets: int = 0
    """Number of offsets within a page for which a token was compared."""
    forks: int = 0
    requests: int = 0
    """Number of sequences that were started and released."""
    rows: int = 0
    """Number of decoded tokens and prompts that were compared with the reference engine."""
    together: int = 0
    """Maximum length in tokens that two sequences of a full batch reached at the same time."""
    prompts: int = 0
    """Number of prompts and later prompt chunks whose logits were compared."""
    turns: int = 0
    """Number of prompt chunks that were added to sequences after decoding."""
    steps: int = 0
    preempted: int = 0
    """Number of times that a full pool preempted a request, which was then recomputed."""
    seed: int = 0
    share: float = 1.0
    """Share of the test that ran; below 1 if the user's own questions are few."""

    def __str__(self) -> str:
        counts = (("forks", self.forks), ("turns", self.turns), ("preemptions in a full pool", self.preempted))
        also = "".join(f", {count} {name}" for name, count in counts if count)
        prompts = f", {self.prompts} of prompts" if self.prompts else ""
        reduced = f"; reduced to {100 * self.share:.0f} % of the test, because the questions are few" if self.share < 1 else ""
        return (
            f"{self.rows} tokens{prompts} as the reference engine computes them, up to {self.tokens:,} tokens, "
            f"{self.decoded} of them decoded, batch {self.batch}, {self.page_offsets} of {PAGE_TOKENS} page offsets{also}, "
            f"{self.requests:,} requests, {self.steps:,} decode steps{reduced}"
        )


class FreeAnswers(Record):
    """Answers of `generate` to some samples, compared with forced decode of the same tokens."""

    samples: int
    tokens: int
    contradictions: list[str]
    """First contradiction of every sample that has one."""


class FullPool(Record):
    """Requests in a pool that holds a third of their pages, compared with the same requests in a large pool."""

    requests_per_round: int
    requests: int = 0
    """Number of compared requests over all rounds; 0 for an engine whose pool cannot be made small."""
    pages: int = 0
    wanted_pages: int = 0
    """Pages that all requests of a round need without sharing."""
    preempted: int = 0
    """Number of times that a request was preempted and then recomputed."""
    reused: int = 0
    """Prompt tokens that vLLM took from its prefix cache."""
    limit_kl: float | None = None
    """Maximum mean KL in nats, between a request in the small pool and in the large pool, that counts as noise."""
    deviations: tuple[str, ...] = ()
    """Descriptions of the requests that differ by more than noise, the worst first."""


class EngineTests(Record):
    """Results of one engine's tests beyond the scored samples."""

    free_answers: FreeAnswers
    stress: StressResult | None = None
    """None for the baseline, for a candidate that failed the questions, or if no request is compared with the reference engine
    (`workloads.conformance_samples`)."""
    full_pool: FullPool | None = None
    """Result in a full pool; None for the baseline, for a candidate that failed the questions, or if it was not requested."""
