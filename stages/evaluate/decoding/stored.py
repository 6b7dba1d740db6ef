"""What was measured of an engine, baseline or candidate: the samples of a round, and what is measured a single time.

A round's directory holds `round.json` (`Measured`), `answers.jsonl`, `statistics.safetensors` and `logprobs.safetensors` (see
`scores`): of the baseline all samples, of a candidate those that it repeats. `require_able` refuses kinds of work whose right
answers the baseline hardly gives: no candidate could lose any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
from pydantic import BaseModel, TypeAdapter
from safetensors.numpy import load_file, save_file

from pipeline.core.errors import CannotBeJudged
from pipeline.verdict.conformance import EngineConformance
from pipeline.verdict.coverage import Exercised, FreeAnswers, Pressure, Probe, ReusedPrefixes, Speculated
from pipeline.verdict.delivery import ScaleChange
from pipeline.verdict.report import Canary, Fidelity, SystemMetrics, jsonl_lines
from stages.evaluate.decoding.rows import Answer, probability
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.inputs.tokens import EncodedSample

LOGPROBS = "logprobs.safetensors"
STATISTICS = "statistics.safetensors"
ANSWERS = "answers.jsonl"
ROUND = "round.json"
ONCE = "once.json"

_ANSWER = TypeAdapter(tuple[str, Answer])


class Measured(BaseModel):
    """What a round says of an engine besides its answers and statistics."""

    samples_digest: str
    vocab_size: int
    policy: str
    takes_effect: dict[str, int] = {}
    """See KVPolicy."""
    coverage: Exercised
    conformance: EngineConformance | None = None
    """Of the first round, where the engine has a reference engine."""
    compute_dtype: str | None = None
    """Type of the engine's activations, where it was compared with its reference engine."""
    scale_changes: list[ScaleChange] | None = None
    right_answers: dict[str, list[int]] = {}
    """Of the baseline: the tokens of its own right answers that are scored in place of references, by sample."""


class Once(BaseModel):
    """What is measured of an engine a single time, on the samples of the first round and beside them."""

    system: SystemMetrics
    free_answers: FreeAnswers
    noise: Fidelity | None = None
    """None where no sample is repeated."""
    coverage: Exercised = Exercised()
    """Of the repeated samples; a candidate's."""
    canary: Canary | None = None
    """A candidate's."""
    probe: Probe | None = None
    reused: ReusedPrefixes | None = None
    speculated: Speculated | None = None
    pressure: Pressure | None = None
    """A candidate's."""

    def write(self, out: Path) -> None:
        """Write the file that `read` reads into a directory."""
        (out / ONCE).write_text(self.model_dump_json(indent=1), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Once":
        """Read what `write` wrote."""
        return cls.model_validate_json((directory / ONCE).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Round:
    """A measured round in memory."""

    record: Measured
    answers: Mapping[str, Answer]
    """By the id of the sample that is judged."""
    statistics: StepStatistics
    """Of its scored tokens, one sample after the other."""

    def scored(self, encoded: Sequence[EncodedSample]) -> list[EncodedSample]:
        """Return samples of the round with what is scored of them, where this is the baseline's round."""
        own = self.record.right_answers
        return [item.answered(own[item.sample.id]) if item.sample.id in own else item for item in encoded]

    def answers_to(self, encoded: Sequence[EncodedSample]) -> list[Answer | None]:
        """Return the answer to each sample, None for a sample that is not judged."""
        return [self.answers.get(item.sample.id) for item in encoded]

    def statistics_of(self, encoded: Sequence[EncodedSample]) -> list[StepStatistics]:
        """Return the statistics of the scored tokens of each sample of the round, as `scored` of the baseline gives them."""
        ends = np.cumsum([0, *(len(item.reference) for item in encoded)]).tolist()
        return [self.statistics.part(start, stop) for start, stop in pairwise(ends)]

    def write(self, out: Path) -> None:
        """Write the files that `read_round` reads into a directory."""
        lines = (_ANSWER.dump_json((name, answer)).decode() + "\n" for name, answer in self.answers.items())
        (out / ANSWERS).write_text("".join(lines), encoding="utf-8")
        save_file(vars(self.statistics), str(out / STATISTICS))
        (out / ROUND).write_text(self.record.model_dump_json(indent=1), encoding="utf-8")


def read_round(directory: Path) -> Round:
    """Read what `Round.write` wrote."""
    return Round(
        Measured.model_validate_json((directory / ROUND).read_text(encoding="utf-8")),
        dict(_ANSWER.validate_json(line) for line in jsonl_lines(directory / ANSWERS)),
        StepStatistics(**load_file(str(directory / STATISTICS))),
    )


def require_able(encoded: Sequence[EncodedSample], measured: Round, least: float) -> None:
    """Refuse questions that the baseline cannot answer, before any candidate is asked.

    Args:
        encoded: The samples of the first round.
        measured: The baseline's answers to them, and the statistics of its scored tokens.
        least: `gates.min_baseline_probability`.

    Raises:
        CannotBeJudged: where right answers of a kind of work are less probable in the mean.
    """
    scored = measured.scored(encoded)
    kinds: dict[str, list[tuple[bool, float]]] = {}
    for item, answer, steps in zip(scored, measured.answers_to(scored), measured.statistics_of(scored), strict=True):
        if answer is not None:
            kind = kinds.setdefault(item.sample.workload, [])
            kind.append((answer.judgement.correct, probability(steps.baseline_nll, item)))
    weak = {}
    for name, kind in sorted(kinds.items()):
        mean = fmean(chance for _, chance in kind)
        if not mean >= least:
            right = sum(correct for correct, _ in kind)
            weak[name] = f"{right} of {len(kind)} questions of {name} ({100 * mean:.2g} % probable in the mean)"
    if weak:
        these = "this kind of work" if len(weak) == 1 else "these kinds of work"
        said = f"FP16 itself answers {'; '.join(weak.values())}: {these} cannot be judged, and no candidate was run"
        raise CannotBeJudged(said, list(weak), sorted(kinds.keys() - weak))
