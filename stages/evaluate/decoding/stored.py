"""Stored measurements of an engine (baseline or candidate): the samples of a round, and the measurements made only once.

A round's directory contains `round.json` (`Round`), `statistics.safetensors` (`StepStatistics` by sample id, one row per field)
and `logprobs.safetensors` (see `distances.distance`). The last file has all samples of a baseline, or the repeated samples of a
candidate. `refuse_weak` refuses workloads whose right answers are improbable under the baseline, because a candidate's losses
would not show there.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from pydantic import BaseModel, Field, InstanceOf
from safetensors.numpy import load_file, save_file

from stages.core.errors import CannotBeJudged, short
from stages.core.records import Sample
from stages.core.redaction import printable, redact_text
from stages.evaluate.decoding.rows import JudgedAnswer, probability
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.inputs.tokens import EncodedSample
from stages.policies.delivery import ScaleChange
from stages.verdict.conformance import EngineConformance
from stages.verdict.coverage import Exercised
from stages.verdict.report import EngineTests

LOGPROBS = "logprobs.safetensors"
STATISTICS = "statistics.safetensors"
STEPS = "/steps"
"""End of the key of a sample's statistics."""
ROUND = "round.json"
TESTS = "tests.json"


class Round(BaseModel):
    """The measurements of one round on one engine."""

    policy: str
    takes_effect: dict[str, int] = {}
    coverage: Exercised
    conformance: EngineConformance | None = None
    """Conformance in the first round, if the engine has a reference engine."""
    rounding: float | None = None
    """Rounding error that the comparison with the reference engine assumed (`Backend.rounding`). None if there was no
    comparison, or if the engine's arithmetic differs by design."""
    scale_changes: list[ScaleChange] | None = None
    right_answers: dict[str, list[int]] = {}
    """Tokens of the baseline's own right answers that replace references, by sample id. Empty for candidates."""
    answers: dict[str, JudgedAnswer]
    statistics: dict[str, InstanceOf[StepStatistics]] = Field(exclude=True, default={})
    """Statistics of the scored tokens by sample id."""

    def scored(self, encoded: Sequence[EncodedSample]) -> list[EncodedSample]:
        """Return the samples with the references that were scored. Call it on the baseline's round."""
        answers = self.right_answers
        return [item.with_answer(answers[item.sample.id]) if item.sample.id in answers else item for item in encoded]

    def write(self, out: Path) -> None:
        # A sample may be called __metadata__, which safetensors keeps for itself.
        arrays = {f"{name}{STEPS}": np.stack(steps) for name, steps in self.statistics.items()}
        save_file(arrays, str(out / STATISTICS))
        (out / ROUND).write_text(self.model_dump_json(indent=1), encoding="utf-8")


def read_round(directory: Path) -> Round:
    stored = Round.model_validate_json((directory / ROUND).read_text(encoding="utf-8"))
    arrays = load_file(str(directory / STATISTICS))
    statistics = {name.removesuffix(STEPS): StepStatistics(*rows) for name, rows in arrays.items()}
    return stored.model_copy(update={"statistics": statistics})


def write_tests(tests: EngineTests, out: Path) -> None:
    """Write the measurements that are made only once."""
    (out / TESTS).write_text(tests.model_dump_json(indent=1), encoding="utf-8")


def read_tests(directory: Path) -> EngineTests:
    return EngineTests.model_validate_json((directory / TESTS).read_text(encoding="utf-8"))


def refuse_weak(encoded: Sequence[EncodedSample], measured: Round, minimum: float) -> None:
    """Raise CannotBeJudged if a workload's right answers have a mean probability below `minimum` in the baseline's round 1."""
    workloads: dict[str, list[tuple[Sample, JudgedAnswer, float]]] = {}
    for item in measured.scored(encoded):
        sample = item.sample
        answer = measured.answers.get(sample.id)
        if answer is not None:
            chance = probability(measured.statistics[sample.id].baseline_nll, item)
            workloads.setdefault(sample.workload, []).append((sample, answer, chance))
    weak: dict[str, str] = {}
    shown: list[tuple[Sample, str]] = []
    for name, answers in sorted(workloads.items()):
        mean = fmean(chance for *_, chance in answers)
        if not mean >= minimum:
            right = sum(answer.correct for _, answer, _ in answers)
            weak[name] = (
                f"{right} of {len(answers)} questions of {name} (mean probability of the references {100 * mean:.2g} %)"
            )
            # If most answers are right, the model words them differently from the references.
            mostly_right = 2 * right > len(answers)
            shown += [(sample, answer.text) for sample, answer, _ in answers if answer.correct == mostly_right]
    if weak:
        these = "this workload" if len(weak) == 1 else "these workloads"
        message = (
            f"FP16 itself answers {'; '.join(weak.values())}: {these} cannot be judged, and no candidate was run; "
            f"gates.min_baseline_probability is {100 * minimum:g} %"
        )
        lines = [_describe_answer(*answer) for answer in shown[:SHOWN_ANSWERS]]
        raise CannotBeJudged(message, list(weak), sorted(workloads.keys() - weak), lines)


SHOWN_ANSWERS, SHOWN_CHARS = 3, 160
"""Maximum answers in a refusal, and maximum characters of each shown text."""


def _describe_answer(sample: Sample, answer: str) -> str:
    """Return a line with the end of a question, its reference and the answer, without secrets."""
    question = sample.messages[-1][1] if sample.messages else sample.prompt
    question = _one_line(question)
    if len(question) > SHOWN_CHARS:
        question = f"...{question[3 - SHOWN_CHARS :]}"
    expected = short(_one_line(sample.reference), SHOWN_CHARS)
    answered = short(_one_line(answer), SHOWN_CHARS)
    return f'{sample.id} (check "{sample.check}"): asked {printable(question)!r}, expected {expected!r}, answered {answered!r}'


def _one_line(text: str) -> str:
    return " ".join(redact_text(text).split())
