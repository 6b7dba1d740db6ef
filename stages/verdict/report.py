"""The typed report of one evaluation. `stages.evaluate` writes it; the gates and tracking read it.

Units: KL and NLL in nats per token, times in milliseconds, memory in KiB or bytes. A float that was not finite is null,
because JSON has no NaN; the gates treat null as a failure.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from stages.core.records import Number, Record
from stages.policies.policy import PAGE_TOKENS, whole_pages
from stages.policies.scales import ScaleChange
from stages.verdict.conformance import Conformance
from stages.verdict.coverage import FORKS, Exercised, Limits

REPORT_FILE = "report.json"
SAMPLES_FILE = "samples.jsonl"

Count = Annotated[int, Field(ge=1, lt=1 << 53)]
"""A count. Means and bounds use float64, which cannot represent every integer from 2^53 on."""

Probability = Annotated[float, Field(ge=0, le=1.001)] | None
"""A product of float32 probabilities, which rounding may push slightly above 1."""


class Acceptance(Record):
    """Token and pass counts of answers under speculative decoding with one drafter."""

    baseline_tokens: Count
    baseline_passes: Count
    candidate_tokens: Count
    candidate_passes: Count

    @property
    def lengths(self) -> tuple[float, float]:
        """Mean acceptance lengths, in tokens per pass, of the baseline and of the candidate."""
        return self.baseline_tokens / self.baseline_passes, self.candidate_tokens / self.candidate_passes


class SampleRow(Record):
    """The results of baseline and candidate on one sample. Means are over the sample's scored tokens."""

    id: str
    workload: str
    document: str
    """Id of the document. All rows of one document together give one number to a gate."""
    context_tokens: Count
    scored_tokens: Count
    judged: bool
    """Whether the sample has an answer that is right or wrong. If not, the five fields below are null."""
    baseline_correct: bool | None
    candidate_correct: bool | None
    reference: str | None
    baseline_generation: str | None
    candidate_generation: str | None
    mean_kl: Number
    max_kl: Number
    far_tokens: Annotated[int, Field(ge=0, lt=1 << 53)]
    """Number of scored tokens with a KL above FAR_KL."""
    baseline_nll: Number
    candidate_nll: Number
    top1_agreement: Number
    top10_overlap: Number
    non_finite_steps: int
    difficulty: str = ""
    """Difficulty in graded workloads: "easy", "medium" or "hard"; empty in others."""
    round: Count = 1
    """Round that ran the sample, from 1. A sequential evaluation stops once its gates have decided."""
    acceptance: dict[str, Acceptance] = Field(default={})
    baseline_probability: Probability = None
    """Probability of the right answer under the baseline: the product over the scored tokens. Null if the sample has no right
    answer, or if a token's probability is not finite."""
    candidate_probability: Probability = None
    right_answer: Literal["reference", "baseline"] = "reference"
    """Wording of the right answer that was scored: the reference's, or the baseline's own."""


class Fidelity(Record):
    """Distances between the next-token distributions of candidate and baseline."""

    tokens: int
    baseline_nll: Number
    candidate_nll: Number
    ppl_ratio: Number
    kl_mean: Number
    kl_p999: Number
    kl_max: Number
    top1_agreement: Number
    top10_overlap: Number
    non_finite_steps: int


class Accuracy(Record):
    """The accuracy of answers, paired by sample."""

    judged: int
    baseline: float
    candidate: float
    lost: int
    """Answers that are right under the baseline and wrong under the candidate."""
    gained: int
    baseline_probability: Number = None
    """Mean probability of the right answer under the baseline; null if any sample has none."""
    candidate_probability: Number = None

    @classmethod
    def from_rows(cls, judged: Sequence[SampleRow]) -> "Accuracy":
        """Count the answers to judged samples; `judged` must not be empty."""

        def mean(name: str) -> float | None:
            values = [value for row in judged if (value := getattr(row, name)) is not None]
            return sum(values) / len(values) if len(values) == len(judged) else None

        return cls(
            judged=len(judged),
            baseline=sum(bool(row.baseline_correct) for row in judged) / len(judged),
            candidate=sum(bool(row.candidate_correct) for row in judged) / len(judged),
            lost=sum(bool(row.baseline_correct) and not row.candidate_correct for row in judged),
            gained=sum(bool(row.candidate_correct) and not row.baseline_correct for row in judged),
            baseline_probability=mean("baseline_probability"),
            candidate_probability=mean("candidate_probability"),
        )

    @property
    def recovery(self) -> float | None:
        """Share of the probability of right answers that the candidate keeps; None if unknown, or if the baseline's is 0."""
        if self.candidate_probability is None or not self.baseline_probability:
            return None
        return self.candidate_probability / self.baseline_probability


class Slice(Record):
    """Metrics of a subset of the samples: a workload (null: all), a context bin [low, high) in tokens (null: all), or both."""

    workload: str | None
    context: tuple[int, int | None] | None
    samples: int
    accuracy: Accuracy | None
    fidelity: Fidelity
    acceptance: dict[str, Acceptance] = Field(default={})

    @property
    def place(self) -> str:
        """Name of the workload's context bin in a verdict line: `copy [0, 256)`."""
        low, high = self.context or (0, None)
        return f"{self.workload} [{low}, {'' if high is None else high})"

    @property
    def acceptance_lengths(self) -> dict[str, float]:
        """Tokens per pass by drafter and engine; a key is `acceptance_lookup_baseline`."""
        return {
            f"acceptance_{drafter}_{engine}": length
            for drafter, counts in self.acceptance.items()
            for engine, length in zip(("baseline", "candidate"), counts.lengths, strict=True)
        }


MEMORY = "memory"
"""Annotation of fields about the cache's memory; also their prefix in the tracked metrics."""


class SystemMetrics(Record):
    """Times of the fixed load, and the cache's memory (fields annotated with MEMORY)."""

    time_to_first_token_ms: float
    decode_tokens_per_s: Number
    others_share: Number = None
    """Share of the processor time that other programs used during the load; null if the engine runs in another process."""
    inter_token_p50_ms: Number
    inter_token_p95_ms: Number
    inter_token_p99_ms: Number
    kib_per_token: Annotated[Number, MEMORY]
    """KiB per token by the policy: codes and per-token scales of all layers."""
    kib_per_token_allocated: Annotated[Number, MEMORY]
    """KiB per token as measured: size of the engine's pool divided by the tokens that its pages hold."""
    pool_bytes: Annotated[int, MEMORY]
    max_live_tokens: Annotated[int, MEMORY]
    """Tokens that 1 GiB of cache holds in sequences of 1,024 tokens."""
    attention: str | None = None
    """Implementation of the attention in decode steps, if the engine has several: "graph", or "native in 30 of 30 layers"."""


class CacheStatistics(Record):
    """Keys or values of one layer on a sample's first tokens, before and after the policy's quantization."""

    layer: int
    side: Literal["key", "value"]
    low: Number
    high: Number
    p999: Number
    """99.9th percentile of the magnitudes."""
    snr_db: Number
    """Signal-to-noise ratio in dB: mean square of the numbers, relative to that of the error; null without an error."""


class StressResult(Record):
    """The stress test: an engine compared with its reference engine on random tokens."""

    failures: list[str]
    """Descriptions of the sequences that deviate, with the position of the deviation."""
    allocation: str = ""
    """First difference between the bytes that the engine reports and its policy's claim; empty if there is none."""
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
    """Number of decoded tokens, prompts and later prompt chunks that were compared with the reference engine."""
    together: int = 0
    """Maximum length in tokens that two sequences of a full batch reached at the same time."""
    turns: int = 0
    """Number of prompt chunks that were added to sequences after decoding."""
    preempted: int = 0
    """Number of times that a full pool preempted a request, which was then recomputed."""
    seed: int = 0
    share: float = 1.0
    """Share of the test that ran; below 1 if the user's own questions are few."""

    def __str__(self) -> str:
        counts = (("forks", self.forks), ("turns", self.turns), ("preemptions in a full pool", self.preempted))
        also = "".join(f", {count} {name}" for name, count in counts if count)
        reduced = f"; reduced to {100 * self.share:.0f} % of the test, because the questions are few" if self.share < 1 else ""
        return (
            f"{self.rows} tokens as the reference engine computes them, up to {self.tokens:,} tokens, "
            f"{self.decoded} of them decoded, batch {self.batch}, {self.page_offsets} of {PAGE_TOKENS} page offsets{also}, "
            f"{self.requests:,} requests{reduced}"
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
    """Measurements made only once per engine, on samples of the first round and on other inputs."""

    system: SystemMetrics
    free_answers: FreeAnswers | None
    """Null for the baseline, which is never served."""
    noise: Fidelity | None = None
    """Distance of the engine from itself in another batch composition; null if no sample is repeated."""
    coverage: Exercised = Exercised()
    """Coverage of the repeated samples; candidates only."""
    stress: StressResult | None = None
    """None for the baseline, for a candidate that failed the questions, or if no request is compared with the reference engine
    (`workloads.conformance_samples`)."""
    full_pool: FullPool | None = None
    """Result in a full pool; None for the baseline, for a candidate that failed the questions, or if it was not requested."""
    control: list[SampleRow] = Field(default=[])
    """The must-fail control: the candidate on a few samples, with every key scale multiplied by CONTROL_FACTOR after the
    prefill. Empty for the baseline, which is never served."""
    cache: list[CacheStatistics] = Field(default=[])
    """Keys, then values, of every layer; candidates with a reference engine only."""


class EvaluationReport(Record):
    """All measurements of one engine against one baseline."""

    policy: str
    takes_effect: dict[str, int] = Field(default={})
    """Keys of the policy that have no effect in short sequences -> tokens of the shortest sequence that they affect."""
    engine_digest: str
    baseline_digest: str
    workloads_digest: str
    """sha256 over all encoded samples: prompts, references, checks and documents."""
    samples: int
    planned_rounds: Count
    planned_workloads: dict[str, bool]
    """Planned workload, even if it did not run yet -> whether its samples have answers."""
    planned_bins: int = 0
    """Number of context bins of all workloads in which planned samples have answers. A workload's only bin is not counted."""
    slices: list[Slice]
    conformance: Conformance | None = None
    """Comparison of the engines with their reference engines; null without reference engines."""
    coverage: Exercised | None = None
    tests: EngineTests
    baseline_tests: EngineTests
    scale_changes: list[ScaleChange] | None = None
    """Scales that differ between the candidate and its checkpoint; null for engines that do not load scales by themselves."""
    drafters: list[str]
    """Drafters that were used: `lookup`, `draft`. Empty if `workloads.speculation` is null."""

    def slice(self, workload: str | None = None) -> Slice | None:
        """Return the slice of a whole workload, or of all samples; None if it has no samples."""
        return next((s for s in self.slices if s.context is None and s.workload == workload), None)

    @property
    def overall(self) -> Slice:
        total = self.slice()
        assert total is not None, "a report always has the slice of all samples"
        return total

    @property
    def limits(self) -> Limits | None:
        """Limits that a verdict on this report covers; None if no sample's steps were recorded.

        The token limit comes from the samples alone, because only samples of a length show the quality at that length. The
        batch size does not affect quality, so the batch of the stress test also counts if two of its sequences reached that
        length.
        """
        samples, stress, full_pool = self.coverage, self.tests.stress, self.tests.full_pool
        if samples is None:
            return None
        limits = Limits(tokens=samples.longest_context, room=samples.room, batch=samples.batch)
        if stress is None:
            return limits
        as_long = whole_pages(stress.together) >= whole_pages(samples.longest_context)
        features = (
            ("turns", stress.turns),
            (FORKS, stress.forks + samples.forks),
            ("a full pool", stress.preempted + (full_pool.preempted if full_pool is not None else 0)),
        )
        changes = {
            "batch": max(samples.batch, stress.batch) if as_long else samples.batch,
            "decoded": samples.longest_decode,
            "stress_decoded": stress.decoded,
            "stress_share": stress.share,
            "features": tuple(name for name, count in features if count),
        }
        return limits.model_copy(update=changes)

    @property
    def metrics(self) -> dict[str, float]:
        """The finite numbers that are tracked, by name: `quality/kl_mean`, `perf/...`, `memory/...`."""
        metrics = dict(_numbers("noise/", self.baseline_tests.noise)) | {"quality/samples": float(self.samples)}
        for part in self.slices:
            if part.context is None:
                prefix = f"quality/{part.workload}/" if part.workload else "quality/"
                metrics.update(_numbers(prefix, part.fidelity))
                metrics.update(_numbers(f"{prefix}accuracy_", part.accuracy))
                if part.accuracy is not None and part.accuracy.recovery is not None:
                    metrics[f"{prefix}recovery"] = part.accuracy.recovery
                metrics.update({f"{prefix}{name}": length for name, length in part.acceptance_lengths.items()})
        metrics.update(_numbers("quality/covered_", self.limits))
        for name, value in _numbers("", self.tests.system):
            metrics[("memory/" if MEMORY in SystemMetrics.model_fields[name].metadata else "perf/") + name] = value
        for name in ("decode_tokens_per_s", "others_share", "kib_per_token"):
            if (value := getattr(self.baseline_tests.system, name)) is not None:
                metrics[f"baseline/{name}"] = value
        return metrics


def _numbers(prefix: str, record: Record | None) -> Iterator[tuple[str, float]]:
    for name, value in record.model_dump().items() if record is not None else ():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def load_report(directory: Path) -> EvaluationReport:
    """Return the report of an evaluation's directory. Raises ValueError if the file is not a valid report."""
    return EvaluationReport.model_validate_json((directory / REPORT_FILE).read_text(encoding="utf-8"))


def load_rows(directory: Path) -> list[SampleRow]:
    """Return the samples of an evaluation's directory. Raises ValueError if a line is not a valid sample."""
    text = (directory / SAMPLES_FILE).read_text(encoding="utf-8")
    # `str.splitlines` would also split at U+0085, U+2028 and U+2029, which JSON strings may contain unescaped.
    return [SampleRow.model_validate_json(line) for line in text.split("\n") if line]
