"""The typed report of one evaluation. `stages.evaluate` writes it; the gates and tracking read it.

Units: KL and NLL in nats per token, times in milliseconds, memory in KiB or bytes. A float that was not finite is null,
because JSON has no NaN; the gates treat null as a failure.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from pipeline.verdict.conformance import Conformance
from pipeline.verdict.coverage import EngineProbes, Exercised, Limits, covered
from pipeline.verdict.delivery import ScaleChange
from pipeline.verdict.record import Number, Record

SCHEMA_VERSION = 1
REPORT_FILE = "report.json"
SAMPLES_FILE = "samples.jsonl"

STEP_FLAG_KL = 0.15
"""A decode step with a larger KL to the baseline, in nats, counts as flagged."""

LEAST_STEP = 0.01
"""The smallest share of the planned samples that a round may have."""

Count = Annotated[int, Field(ge=1, lt=1 << 53)]
"""Counts enter means and bounds as float64, which tells larger ones no longer apart."""


Probability = Annotated[float, Field(ge=0, le=1.001)] | None
"""Products of probabilities in float32, each of which rounding may take beyond 1."""


class Acceptance(Record):
    """Answers under speculative decoding with one drafter: their tokens, and the passes of the engine that say them."""

    baseline_tokens: Count
    baseline_passes: Count
    candidate_tokens: Count
    candidate_passes: Count

    @property
    def lengths(self) -> tuple[float, float]:
        """Tokens a pass of the baseline, and of the candidate: the mean acceptance lengths."""
        return self.baseline_tokens / self.baseline_passes, self.candidate_tokens / self.candidate_passes


class SampleRow(Record):
    """One sample, baseline and candidate side by side. Means are over its scored tokens."""

    id: str
    workload: str
    document: str
    """Rows of one document are resampled together."""
    context_tokens: Count
    depth: float | None
    scored_tokens: Count
    judged: bool
    """Whether the sample has an answer that is right or wrong; the seven fields below are null otherwise."""
    baseline_correct: bool | None
    candidate_correct: bool | None
    baseline_valid: bool | None
    """Whether the answer is strict JSON, or a call that a declared tool accepts; null for workloads without such a form."""
    candidate_valid: bool | None
    reference: str | None
    baseline_generation: str | None
    candidate_generation: str | None
    mean_kl: Number
    max_kl: Number
    kl_tail: list[float]
    """The KL of its steps above the pooled 99th percentile, from which any higher percentile of the pool follows."""
    baseline_nll: Number
    candidate_nll: Number
    top1_agreement: Number
    top10_overlap: Number
    mean_squared_delta_p: Number
    non_finite_steps: int
    difficulty: str = ""
    """Graded workloads: "easy", "medium" or "hard"."""
    round: Count = 1
    """The round of the evaluation that ran it, from 1: a sequential evaluation stops once its gates have decided."""
    acceptance: dict[str, Acceptance] = Field(default={})
    """By drafter, of its two answers."""
    baseline_probability: Probability = None
    """Probability of the right answer under the baseline: the product over the scored tokens. Null for a sample without a
    right answer, and where a token's probability is not finite."""
    candidate_probability: Probability = None
    """The same under the candidate."""
    right_answer: Literal["reference", "baseline"] = "reference"
    """Which words of the right answer were scored: the reference's, or those that the baseline says it in."""
    own_tokens: list[Annotated[int, Field(ge=0)]] = Field(default=[])
    """The baseline's words in tokens, where they were scored."""


class Fidelity(Record):
    """How far the candidate's next-token distributions are from the baseline's."""

    tokens: int
    baseline_nll: Number
    candidate_nll: Number
    baseline_ppl: Number
    candidate_ppl: Number
    ppl_ratio: Number
    kl_mean: Number
    kl_median: Number
    kl_p95: Number
    kl_p99: Number
    kl_p999: Number
    kl_max: Number
    flagged_steps: Number
    """Share of steps with KL above STEP_FLAG_KL."""
    top1_agreement: Number
    top10_overlap: Number
    rms_delta_p: Number
    """Root mean square change of the reference token's probability."""
    non_finite_steps: int


class Accuracy(Record):
    """Answers, paired by sample."""

    judged: int
    baseline: float
    candidate: float
    lost: int
    """Right in the baseline, wrong in the candidate."""
    gained: int
    baseline_valid: float | None
    candidate_valid: float | None
    baseline_probability: Number = None
    """Mean probability of the right answer under the baseline; null where one of them is."""
    candidate_probability: Number = None
    """The same under the candidate."""

    @classmethod
    def of(cls, judged: Sequence[SampleRow]) -> "Accuracy":
        """Count the answers to judged samples, of which there are some."""

        def mean(values: list[Number]) -> Number:
            known = [value for value in values if value is not None]
            return sum(known) / len(values) if len(known) == len(values) else None

        def share(values: list[bool | None]) -> float | None:
            known = [value for value in values if value is not None]
            return sum(known) / len(known) if known else None

        return cls(
            judged=len(judged),
            baseline=sum(bool(row.baseline_correct) for row in judged) / len(judged),
            candidate=sum(bool(row.candidate_correct) for row in judged) / len(judged),
            lost=sum(bool(row.baseline_correct) and not row.candidate_correct for row in judged),
            gained=sum(bool(row.candidate_correct) and not row.baseline_correct for row in judged),
            baseline_valid=share([row.baseline_valid for row in judged]),
            candidate_valid=share([row.candidate_valid for row in judged]),
            baseline_probability=mean([row.baseline_probability for row in judged]),
            candidate_probability=mean([row.candidate_probability for row in judged]),
        )

    @property
    def difference(self) -> float:
        """The candidate's accuracy minus the baseline's."""
        return (self.gained - self.lost) / self.judged

    @property
    def recovery(self) -> float | None:
        """Share of the probability of right answers that the candidate keeps; None where one is unknown, or the first is 0."""
        if self.candidate_probability is None or not self.baseline_probability:
            return None
        return self.candidate_probability / self.baseline_probability


class Slice(Record):
    """Metrics of some samples: of a workload (null: all), a context bin [low, high) in tokens, a third of the depth, or a
    difficulty."""

    workload: str | None
    context: tuple[int, int | None] | None
    depth: str | None
    samples: int
    documents: int
    accuracy: Accuracy | None
    fidelity: Fidelity
    difficulty: str | None = None
    acceptance: dict[str, Acceptance] = Field(default={})
    """By drafter."""

    @property
    def whole(self) -> bool:
        """Whether it is of all samples of its workload, or of everything."""
        return (self.context, self.depth, self.difficulty) == (None, None, None)

    @property
    def place(self) -> str:
        """Where a line of a verdict on its context bin stands: `copy [0, 256)`."""
        low, high = self.context or (0, None)
        return f"{self.workload} [{low}, {'' if high is None else high})"

    @property
    def acceptance_lengths(self) -> dict[str, float]:
        """Tokens a pass by drafter and engine: `acceptance_lookup_baseline`."""
        return {
            f"acceptance_{drafter}_{engine}": length
            for drafter, counts in self.acceptance.items()
            for engine, length in zip(("baseline", "candidate"), counts.lengths, strict=True)
        }


class Canary(Record):
    """The candidate with every key scale multiplied by `factor` after the prefill, on a few samples."""

    factor: float
    rows: list[SampleRow]


MEMORY = "memory"
"""Marks a figure of the cache's memory, under which it is tracked."""


class SystemMetrics(Record):
    """Times of the fixed load, and the cache's memory (figures marked MEMORY)."""

    batch: int
    context_tokens: int
    new_tokens: int
    time_to_first_token_ms: float
    decode_tokens_per_s: Number
    decode_tokens_per_s_slow: Number = None
    """Of the decode step than which one in twenty is slower."""
    decode_tokens_per_s_fast: Number = None
    """Of the decode step than which one in twenty is faster."""
    inter_token_p50_ms: Number
    inter_token_p95_ms: Number
    inter_token_p99_ms: Number
    kib_per_token: Annotated[Number, MEMORY]
    """Computed from the policy: codes and per-token scales of all layers."""
    kib_per_token_allocated: Annotated[Number, MEMORY]
    """Measured: bytes of the pool that the engine allocated, over the tokens that its pages hold."""
    pool_bytes: Annotated[int, MEMORY]
    budget_gib: Annotated[float, MEMORY]
    sequence_tokens: Annotated[int, MEMORY]
    max_live_tokens: Annotated[int, MEMORY]
    threads: int | None = None
    """CPU threads of the engine; null for an engine that is not told how many to use."""
    attention: str | None = None
    """What computes a decode step's attention, where the engine has a choice: "graph", or "native in 30 of 30 layers"."""


class EvaluationReport(Record):
    """Everything that was measured of one engine against one baseline."""

    schema_version: int
    policy: str
    takes_effect: dict[str, int] = Field(default={})
    """Keys of the policy that change nothing in short sequences -> tokens of the shortest sequence that they change."""
    engine_digest: str
    baseline_digest: str
    workloads_digest: str
    """sha256 of every encoded sample: prompts, references, checks and documents."""
    samples: int
    planned_rounds: list[float]
    """Cumulative share of the planned samples after each round that was planned, run or not."""
    planned_workloads: dict[str, bool]
    """Every workload that was planned, run so far or not -> whether its samples have answers."""
    slices: list[Slice]
    noise: Fidelity | None
    """The baseline against itself, in smaller batches; null where no sample is repeated."""
    canary: Canary
    system: SystemMetrics
    baseline_system: SystemMetrics
    """The same load on the baseline, timed when the baseline was measured."""
    conformance: Conformance | None = None
    """Both engines against the oracle under their own policies; null without reference engines."""
    candidate_noise: Fidelity | None = None
    """The candidate against itself."""
    coverage: Exercised | None = None
    """What the samples took the engine through."""
    probes: EngineProbes
    scale_changes: list[ScaleChange] | None = None
    """Scales that the candidate does not use as its checkpoint carries them; null for engines that load none by themselves."""
    drafters: list[str]
    """Those that answers were drafted with: `lookup`, `draft`. Empty where `workloads.speculation` is null."""

    @field_validator("planned_rounds")
    @classmethod
    def _ascends_to_one(cls, shares: list[float]) -> list[float]:
        steps = [high - low for low, high in pairwise([0.0, *shares])]
        if not shares or shares[-1] != 1 or min(steps) < LEAST_STEP * (1 - 1e-9):
            raise ValueError(f"planned_rounds must ascend to 1 in steps of {LEAST_STEP} or more, got {shares}")
        return shares

    def slice(self, workload: str | None = None) -> Slice | None:
        """Return the slice of a whole workload, or of everything; None when it has no samples."""
        return next((s for s in self.slices if s.whole and s.workload == workload), None)

    @property
    def overall(self) -> Slice:
        """The slice of everything."""
        whole = self.slice()
        assert whole is not None, "a report always has the slice of everything"
        return whole

    @property
    def limits(self) -> Limits | None:
        """How far a verdict on this report holds; None if no sample's steps were recorded."""
        return covered(self.coverage, self.probes)


def jsonl_lines(path: Path) -> list[str]:
    """Return the lines of a JSONL file, one JSON value each.

    `str.splitlines` would also split at U+0085, U+2028 and U+2029, which JSON strings may hold unescaped.
    """
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]


def load_report(directory: Path) -> EvaluationReport:
    """Read the report in an evaluation's directory. Raises ValueError when it is no report."""
    return EvaluationReport.model_validate_json((directory / REPORT_FILE).read_text(encoding="utf-8"))


def load_rows(directory: Path) -> list[SampleRow]:
    """Read the samples in an evaluation's directory. Raises ValueError when they are no samples."""
    return [SampleRow.model_validate_json(line) for line in jsonl_lines(directory / SAMPLES_FILE)]
