"""Configuration of an evaluation's samples, their batches, and the fixed load for timing."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from stages.core.strict import PathText, StrictModel
from stages.policies.policy import PAGE_TOKENS, whole_pages

Workload = Literal[
    "prose", "retrieval", "tool_call", "copy", "multi_turn", "documentation", "lookup", "extraction", "quotation", "recall"
]
"""The built-in workloads of `stages.workloads.generated.WORKLOADS`: first the tiny model's training tasks, then tasks for any
chat model."""

PAGES: set[Workload] = {"documentation", "lookup", "extraction", "quotation", "recall"}
"""Workloads about pages of text, whose answers are single lines."""

LONG = "long_"
"""Prefix of the workloads of `workloads.lengths`, followed by the length in tokens."""
LONG_DOCUMENTS, LONG_QUESTIONS = 15, 7
"""Default number of documents per length, which is the default of `gates.min_samples`; number of questions per document."""

MIN_FULL_POOL = 8

WARMUP_STEPS = 2
"""Untimed decode steps at the start of a load."""
LIVE_GIB, LIVE_SEQUENCE_TOKENS = 1.0, 1024
"""Cache memory in GiB and sequence length in tokens for which the number of live tokens is computed."""
LOOKUP_TOKENS, LOOKUP_NGRAM = 10, 3
"""Maximum tokens that prompt lookup proposes per pass, and maximum length of the suffix that it searches for."""
DRAFT_TOKENS = 5
"""Maximum tokens that a draft checkpoint proposes per pass."""
CONTROL_FACTOR = 0.1
"""Factor of the must-fail control for every key scale."""
CONTROL_SAMPLES = 8
"""Samples of the must-fail control. Two do not suffice: a sample loses nothing if its answer's tokens are kept exact."""

Count = Annotated[int, Field(ge=0, le=100_000)]
Positive = Annotated[int, Field(ge=1, le=1_000_000)]


class LoadConfig(StrictModel):
    """The load for system metrics: `batch` sequences of `context_tokens` tokens and `new_tokens` timed decode steps."""

    batch: Annotated[int, Field(ge=1, le=4096)]
    """Sequences that are decoded together."""
    context_tokens: Positive
    """Tokens per sequence before the first decode step."""
    new_tokens: Annotated[int, Field(ge=2, le=100_000)]
    """Number of timed decode steps."""

    @property
    def tokens(self) -> int:
        return self.context_tokens + WARMUP_STEPS + self.new_tokens


GSM8K_PROBLEMS = 1319

MIN_STRESS_TOKENS = 128
MIN_SHARE = 1 / 10
"""Minimum share of the stress test that runs with few own questions."""


class StressTestConfig(StrictModel):
    """Limits of the stress test, which compares an engine with the reference engine; the engine's own limits also apply."""

    max_tokens: Annotated[int, Field(ge=MIN_STRESS_TOKENS, le=1 << 20)] = 2048
    """Maximum tokens per sequence."""
    decode_steps: Annotated[int, Field(ge=8, le=100_000)] = 400
    """Number of decode steps of two long sequences: one starts with a prompt of one token, the other decodes the engine's own
    answer to a longer prompt."""
    offset_steps: Annotated[int, Field(ge=1, le=4096)] = 64
    """Decode steps of the longest sequence; 64 steps visit every offset of a page."""
    max_batch: Annotated[int, Field(ge=2, le=4096)] = 32
    """Maximum sequences per decode step; the evaluation's batch_size if that is larger."""
    requests: Annotated[int, Field(ge=1, le=1_000_000)] = 150
    """Requests of the burst, which is sent twice. A fifth of the requests are long. The second time, a third have different
    tokens. For each request, the test also sends two pairs of short requests and lets the engine idle for 0.03 s."""
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    """Seed of tokens, lengths and order; null draws a new seed for every run, which `report.json` records."""

    def limited(self, longest: int) -> "StressTestConfig":
        """Return the limits with `max_tokens` at most one page above `longest` tokens, which are rounded up to whole pages.

        Longer sequences would only cost time, because a verdict covers no longer sequences than the questions.
        """
        most = max(MIN_STRESS_TOKENS, whole_pages(longest) + PAGE_TOKENS)
        return self.model_copy(update={"max_tokens": min(self.max_tokens, most)})

    def tokens(self, longest: int, claimed: int, largest: int, share: float = 1.0) -> int:
        """Estimate the tokens that the engine is fed and the reference engine replays, by a fit to measurements.

        `longest` and `claimed`: tokens of the longest sequence and sample. `largest`: sequences of the largest batch.
        """
        answers = 13_000 if longest >= 4 * PAGE_TOKENS else 0  # shorter sequences skip "answers" and "long_queue"
        variable = answers + 20 * min(longest, 800) + 182 * self.requests
        fixed = 2600 + 6 * min(longest, 1100) + 6 * longest + 3 * min(claimed, longest) + 340 * largest
        return round(share * variable) + fixed + 5 * min(self.decode_steps, longest) + 250 * self.requests

    def share(self, own: int | None, longest: int, claimed: int, largest: int) -> float:
        """Return the share of the test that runs: of its sequences, operations and repetitions of each kind.

        The test should not take longer than the user's own questions, which have `own` tokens (tokens that the questions of a
        document share count once), but the share is at least MIN_SHARE. If `own` is None (generated questions), the whole test
        runs. See `tokens` for the other arguments.
        """
        if own is None:
            return 1.0
        least, whole = (self.tokens(longest, claimed, largest, share) for share in (0.0, 1.0))
        return min(1.0, max(MIN_SHARE, (own - least) / (whole - least)))

    @property
    def wear_steps(self) -> int:
        """Decode steps of each short request of the scenario `wear`. With 144 or more requests in the burst, the whole test has
        more than 4,096 decode steps, so that it meets a fault of one step in 4,096."""
        return max(3, min(12, self.requests // 12))

    @property
    def steps(self) -> int:
        """Approximate number of decode steps."""
        return 300 + 3 * self.decode_steps + (12 + 2 * self.wear_steps) * self.requests


class SpeculationConfig(StrictModel):
    """Drafters of speculative decoding whose acceptance rate is measured on both engines' answers."""

    draft: PathText | None = None
    """Directory of a small draft checkpoint with the same tokenizer, in addition to prompt lookup; null for none."""

    @property
    def drafters(self) -> list[str]:
        return ["lookup"] if self.draft is None else ["lookup", "draft"]


def long_cost(length: int) -> str:
    """Return a clause with the cost of asking a length."""
    return f"{LONG_DOCUMENTS} documents, {LONG_DOCUMENTS * length:,} tokens to prefill on each engine"


class WorkloadsConfig(StrictModel):
    """The samples of an evaluation and its measurements."""

    samples: dict[Workload, Count]
    """Number of samples per built-in workload; 0 disables a workload. A key that is not given keeps the option's number."""
    jsonl: PathText | None
    """File of additional samples, one JSON object per line with the keys of docs/questions.md#my-questions; null for none."""
    lengths: list[Annotated[int, Field(ge=128, le=1 << 20)]] = Field(default=[])
    """Lengths in tokens of long documents. Their questions replace `samples`, and `context_bins` is replaced by bins that begin
    at three quarters of the lengths."""
    length_documents: Annotated[int, Field(ge=1, le=100_000)] = LONG_DOCUMENTS
    """Number of documents per length, with seven questions each."""
    documents: PathText | None = None
    """Directory of the user's text files (.txt, .md), or one such file, which the documents of `lengths` quote; null for
    Python's documentation."""
    gsm8k: Annotated[int, Field(ge=0, le=GSM8K_PROBLEMS)] = 0
    """Number of additional GSM8K problems, drawn with the seed."""
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Seed of the generated samples."""
    batch_size: Annotated[int, Field(ge=1, le=4096)]
    """Sequences that are decoded together; a finished sequence makes room for the next."""
    extra_new_tokens: Annotated[int, Field(ge=1, le=100_000)]
    """Maximum tokens of an answer beyond the length of its reference."""
    max_scored_tokens: Positive
    """Maximum tokens of a reference that is not checked as an answer (prose)."""
    context_bins: list[int]
    """Lower ends of the prompt-length bins in tokens, ascending from 0; empty bins are omitted."""
    noise_samples: Count
    """Judged samples per workload that both engines repeat in other batches, for the noise floor; the longest sample is
    among them."""
    conformance_samples: Count = 0
    """Number of first-round samples per workload that are compared with the reference engine; they are spread from the shortest
    to the longest. 0 makes the evaluation a quick check, which has no stress test and never passes."""
    rounds: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=1, max_length=100)] = Field(
        default_factory=lambda: [1.0]
    )
    """Cumulative share of the samples after each round, ascending to 1. A candidate runs rounds until its gates decide."""
    stress_test: StressTestConfig = Field(default_factory=StressTestConfig)
    full_pool: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Number of requests of the full-pool test; 0 disables the test, null uses the backend's default. All requests
    are sent at once, twice in different orders, to a pool that holds a third of their pages, and compared with the same
    requests in a large pool."""
    speculation: SpeculationConfig | None = None
    """Drafters of speculative decoding whose acceptance rate is measured; null for none."""
    load: LoadConfig

    @property
    def answers_are_lines(self) -> bool:
        """Whether every answer is one line. If so, a newline ends the answers of a model without a chat template."""
        active = {name for name, count in self.samples.items() if count}
        return active <= PAGES and self.jsonl is None and not self.gsm8k

    @property
    def is_quick_check(self) -> bool:
        """Whether no request is compared with the reference engine: such an evaluation is fast, and never passes."""
        return self.conformance_samples == 0

    def more_questions(self, factor: float) -> list[str]:
        """Return the overrides that ask `factor` times the generated questions of every workload."""
        counts = {f"samples.{name}": count for name, count in self.samples.items() if count}
        if self.lengths:
            counts["length_documents"] = self.length_documents
        more = {key: math.ceil(factor * count) for key, count in counts.items()}
        if "samples.documentation" in more:
            from stages.workloads.documentation import pages  # here, so that a command starts without the texts

            more["samples.documentation"] = min(more["samples.documentation"], len(pages("evaluation")))
        if 0 < self.gsm8k < GSM8K_PROBLEMS:
            more["gsm8k"] = min(math.ceil(factor * self.gsm8k), GSM8K_PROBLEMS)
        return [f"workloads.{key}={count}" for key, count in more.items()]

    @property
    def user_key(self) -> Literal["jsonl", "documents"]:
        """The key that may name the user's samples or texts."""
        return "jsonl" if self.documents is None else "documents"

    @property
    def user_path(self) -> Path | None:
        """Path of the user's samples or texts; None if all samples are generated."""
        path = self.jsonl if self.documents is None else self.documents
        return Path(path).expanduser() if path is not None else None

    @model_validator(mode="before")
    @classmethod
    def _lengths_replace(cls, values: Any) -> Any:
        lengths = values.get("lengths") if isinstance(values, dict) else None
        if not isinstance(lengths, list) or not lengths or not all(isinstance(length, int) for length in lengths):
            return values
        bins = sorted({0, *(3 * length // 4 for length in lengths)})  # lengths that differ by one token share a bin
        return {**values, "samples": {}, "context_bins": bins}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"lengths must be different, got {self.lengths}; give each length once")
        if self.documents is not None and (self.jsonl is not None or not self.lengths):
            raise ValueError("documents: needs workloads.lengths and excludes workloads.jsonl; give lengths, and no jsonl")
        if not any(self.samples.values()) and self.jsonl is None and not self.gsm8k and not self.lengths:
            raise ValueError("samples must ask for at least one sample, or jsonl must name a file")
        edges = self.context_bins
        if len(edges) < 2 or edges[0] != 0 or any(low >= high for low, high in pairwise(edges)):
            raise ValueError(f"context_bins must be at least two ascending token counts from 0, got {edges}")
        if any(low >= high for low, high in pairwise(self.rounds)) or self.rounds[-1] != 1:
            raise ValueError(f"rounds must be ascending shares of the samples up to 1, got {self.rounds}")
        if self.full_pool is not None and 0 < self.full_pool < MIN_FULL_POOL:
            raise ValueError(
                f"full_pool={self.full_pool}: the small pool could not hold two requests; give at least {MIN_FULL_POOL}, or 0"
            )
        return self
