"""Which samples an evaluation runs, how they are batched, and the fixed load that times the engine."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.strict import PathText, StrictModel

Workload = Literal[
    "prose", "retrieval", "tool_call", "copy", "multi_turn", "documentation", "lookup", "extraction", "quotation", "recall"
]
"""The built-in workloads, those of `stages.workloads.WORKLOADS`: first what the tiny model was trained on, then what any chat
model can be asked."""

TRAINED: set[Workload] = {"prose", "retrieval", "tool_call", "copy", "multi_turn"}
PAGES: set[Workload] = {"documentation", "lookup", "extraction", "quotation", "recall"}

LEAST_PRESSED = 8
"""Fewest requests that are pressed into a pool of a third of their pages."""

WARMUP_STEPS = 2
"""Decode steps of a load before those that are timed."""
LIVE_GIB, LIVE_SEQUENCE_TOKENS = 1.0, 1024
"""Cache memory, and length of each sequence, for which the most live tokens are computed."""
CANARY_FACTOR = 0.1
"""Factor by which the must-fail control multiplies every key scale."""

Count = Annotated[int, Field(ge=0, le=100_000)]
Positive = Annotated[int, Field(ge=1, le=1_000_000)]


class LoadConfig(StrictModel):
    """The load that system metrics are timed on: `batch` sequences of `context_tokens`, `new_tokens` decode steps."""

    batch: Annotated[int, Field(ge=1, le=4096)]
    """Sequences that are decoded together."""
    context_tokens: Positive
    """Tokens of each sequence before the first decode step."""
    new_tokens: Annotated[int, Field(ge=2, le=100_000)]
    """Decode steps that are timed."""

    @property
    def tokens(self) -> int:
        """Length of a sequence of the load at its end."""
        return self.context_tokens + WARMUP_STEPS + self.new_tokens


GSM8K_PROBLEMS = 1319
"""Of the test set."""


class ProbeConfig(StrictModel):
    """How far random tokens take an engine beside the oracle, where the engine's own limits are not lower."""

    max_tokens: Annotated[int, Field(ge=128, le=1 << 20)] = 2048
    """Longest sequence."""
    decode_steps: Annotated[int, Field(ge=8, le=100_000)] = 400
    """Tokens that sequences decode from short prompts, forced and free."""
    offset_steps: Annotated[int, Field(ge=1, le=4096)] = 64
    """Decode steps of the longest sequence: 64 are every offset of a page."""
    max_batch: Annotated[int, Field(ge=2, le=4096)] = 32
    """Largest decode step; the evaluation's batch_size where that is larger."""
    requests: Annotated[int, Field(ge=1, le=1_000_000)] = 150
    """Requests that come and go, one in five of them long, twice: the second time one in three of them says something else. As
    many short requests are repeated, and the engine is idle for a 50th of a second for each of them."""
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    """Draws tokens, lengths and order; null draws another seed in each run. `report.json` has it."""


class SpeculationConfig(StrictModel):
    """The drafters of speculative decoding whose acceptance is measured on the answers of both engines."""

    lookup_tokens: Annotated[int, Field(ge=0, le=1024)] = 10
    """Most tokens that prompt lookup proposes for a pass of the target; 0 leaves it out."""
    ngram: Annotated[int, Field(ge=1, le=64)] = 3
    """Most of the last tokens that prompt lookup searches for in the text so far."""
    draft: PathText | None = None
    """Directory of a small checkpoint with the same tokenizer, which proposes its greedy continuation; None for none."""
    draft_tokens: Annotated[int, Field(ge=1, le=1024)] = 5
    """Most tokens that the checkpoint proposes for a pass of the target."""

    @property
    def drafters(self) -> list[str]:
        """Names of the drafters that are measured."""
        return [name for name, on in (("lookup", self.lookup_tokens > 0), ("draft", self.draft is not None)) if on]

    @model_validator(mode="after")
    def _drafts_something(self) -> Self:
        if not self.drafters:
            raise ValueError(
                "lookup_tokens=0 without a draft measures nothing; raise it, name a draft, or set speculation=null"
            )
        return self


class WorkloadsConfig(StrictModel):
    """The samples of an evaluation, and how they are run."""

    samples: dict[Workload, Count]
    """Samples of each built-in workload; 0 or absent leaves it out."""
    jsonl: PathText | None
    """The user's own samples beside the built-in ones: one JSON object a line, with the keys of docs/start.md#my-questions."""
    gsm8k: Annotated[int, Field(ge=0, le=GSM8K_PROBLEMS)] = 0
    """Problems of GSM8K beside them, drawn with the seed."""
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Of the generated samples."""
    batch_size: Annotated[int, Field(ge=1, le=1024)]
    """Sequences decoded together; a finished one makes room for the next."""
    extra_new_tokens: Annotated[int, Field(ge=1, le=100_000)]
    """A generation may be this much longer than its reference, in tokens, before it is cut."""
    max_scored_tokens: Positive
    """References that are not checked as answers (prose) are cut to this many tokens."""
    context_bins: list[int]
    """Edges of the prompt-length bins, in tokens, ascending; bins without samples are left out."""
    noise_samples: Count
    """Samples per workload whose answers are judged, besides the longest of these, that both engines repeat in smaller batches:
    the A/A noise floor."""
    canary_samples: Annotated[int, Field(ge=1, le=1000)]
    """Samples per workload of the must-fail control, at least eight in all: the shortest prompts of two pages or more."""
    conformance_samples: Count = 0
    """Samples per workload of the first round that are compared with the oracle, from the shortest to the longest; without any
    the stress test does not run, and nothing passes."""
    rounds: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=1, max_length=100)] = Field(
        default_factory=lambda: [1.0]
    )
    """The share of the samples that each round ends at, ascending to 1. A candidate runs rounds until its gates decide."""
    probe: ProbeConfig = Field(default_factory=ProbeConfig)
    pressure: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Requests that are sent at once into a pool that holds a third of them, twice, beside themselves with room; 0 sends none,
    null as many as suit the backend."""
    speculation: SpeculationConfig | None = None
    """Drafters of speculative decoding whose acceptance is measured; None measures none."""
    load: LoadConfig

    @property
    def answers_are_lines(self) -> bool:
        """Whether every answer is one line, as those about pages are: few-shot text ends them as it ends its lines."""
        asked = {name for name, count in self.samples.items() if count}
        return asked <= PAGES and self.jsonl is None and not self.gsm8k

    @property
    def file(self) -> Path | None:
        return Path(self.jsonl).expanduser() if self.jsonl is not None else None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not any(self.samples.values()) and self.jsonl is None and not self.gsm8k:
            raise ValueError("samples must ask for at least one sample, or jsonl must name a file")
        edges = self.context_bins
        if len(edges) < 2 or edges[0] < 0 or any(low >= high for low, high in pairwise(edges)):
            raise ValueError(f"context_bins must be at least two ascending token counts from 0, got {edges}")
        if any(low >= high for low, high in pairwise(self.rounds)) or self.rounds[-1] != 1:
            raise ValueError(f"rounds must be ascending shares of the samples up to 1, got {self.rounds}")
        if self.pressure is not None and 0 < self.pressure < LEAST_PRESSED:
            raise ValueError(
                f"pressure={self.pressure}: a third of so few holds no two requests; give at least {LEAST_PRESSED}, or 0"
            )
        return self
