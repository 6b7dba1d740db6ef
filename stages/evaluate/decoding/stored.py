"""The directory of a measured round: what is in it, and how it is written and read.

A baseline's round holds `logprobs.safetensors` (see `scores`), `answers.jsonl` and `round.json` (`BaselineRound`), that of a
candidate `statistics.safetensors`, `answers.jsonl` and `round.json` (`CandidateRound`).
"""

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel
from safetensors.numpy import load_file, save_file

from pipeline.verdict.conformance import EngineConformance
from pipeline.verdict.coverage import Coverage, FreeAnswers, Probe, ReusedPrefixes
from pipeline.verdict.delivery import ScaleChange, ServerSeen
from pipeline.verdict.report import Canary, NoiseFloor, SystemMetrics, Work, jsonl_lines
from stages.evaluate.decoding.rows import Answer
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.inputs.checks import Judgement
from stages.evaluate.inputs.tokens import EncodedSample

LOGPROBS = "logprobs.safetensors"
STATISTICS = "statistics.safetensors"
ANSWERS = "answers.jsonl"
ROUND = "round.json"


class BaselineRound(BaseModel):
    """The content of a baseline's round.json."""

    samples_digest: str
    vocab_size: int
    noise: NoiseFloor | None
    probe: Probe | None
    free_answers: FreeAnswers | None
    system: SystemMetrics | None
    conformance: EngineConformance | None = None
    reused: ReusedPrefixes | None = None
    served: ServerSeen | None = None


class CandidateRound(BaseModel):
    """The content of a candidate's round.json."""

    samples_digest: str
    policy: str
    work: Work
    checks: list[tuple[float | None, float | None]]
    """The KL over the vocabulary and that over the head, of the tokens whose whole distribution is known."""
    canary: Canary | None
    coverage: Coverage | None
    """None of a server, of whose steps nothing is seen."""
    noise: NoiseFloor | None
    probe: Probe | None
    free_answers: FreeAnswers | None
    system: SystemMetrics | None
    conformance: EngineConformance | None = None
    scale_changes: list[ScaleChange] | None = None
    reused: ReusedPrefixes | None = None
    compute_dtype: str | None = None
    """Type of the engine's activations, where it was compared with its twin."""
    served: ServerSeen | None = None
    top_logprobs: int | None = None
    canary_url: str | None = None


class _StoredAnswer(BaseModel):
    """A line of answers.jsonl."""

    id: str
    text: str
    valid: bool | None
    correct: bool
    tokens: tuple[int, ...]
    passes: dict[str, tuple[int, int]]


def write_record(directory: Path, record: BaselineRound | CandidateRound) -> None:
    """Write a round's record."""
    (directory / ROUND).write_text(record.model_dump_json(indent=1), encoding="utf-8")


def read_baseline(directory: Path) -> BaselineRound:
    """Read the record of a baseline's round."""
    return BaselineRound.model_validate_json((directory / ROUND).read_text(encoding="utf-8"))


def read_candidate(directory: Path) -> CandidateRound:
    """Read the record of a candidate's round."""
    return CandidateRound.model_validate_json((directory / ROUND).read_text(encoding="utf-8"))


def write_answers(directory: Path, encoded: Sequence[EncodedSample], answers: Sequence[Answer | None]) -> None:
    """Write the answers to the samples that are judged."""
    stored = [
        _StoredAnswer(
            id=item.sample.id,
            text=a.text,
            valid=a.judgement.valid,
            correct=a.judgement.correct,
            tokens=a.tokens,
            passes=dict(a.passes),
        )
        for item, a in zip(encoded, answers, strict=True)
        if a is not None
    ]
    (directory / ANSWERS).write_text("".join(answer.model_dump_json() + "\n" for answer in stored), encoding="utf-8")


def read_answers(directory: Path, encoded: Sequence[EncodedSample]) -> list[Answer | None]:
    """Return the stored answer to each sample, None for a sample that is not judged."""
    stored = [_StoredAnswer.model_validate_json(line) for line in jsonl_lines(directory / ANSWERS)]
    by_id = {a.id: Answer(a.text, Judgement(valid=a.valid, correct=a.correct), a.tokens, a.passes) for a in stored}
    return [by_id.get(item.sample.id) for item in encoded]


def arrays(steps: StepStatistics) -> dict[str, npt.NDArray[np.generic]]:
    """Return the statistics of tokens as they are stored, by name."""
    return {item.name: np.ascontiguousarray(getattr(steps, item.name)) for item in fields(steps)}


def write_statistics(directory: Path, steps: StepStatistics) -> None:
    """Write the statistics of a round's scored tokens."""
    save_file(arrays(steps), str(directory / STATISTICS))


def read_statistics(directory: Path, encoded: Sequence[EncodedSample]) -> list[StepStatistics]:
    """Return the stored statistics of each sample's reference tokens."""
    joined = StepStatistics(**load_file(str(directory / STATISTICS)))
    ends = np.cumsum([0, *(len(item.reference) for item in encoded)]).tolist()
    return [joined.part(start, stop) for start, stop in pairwise(ends)]
