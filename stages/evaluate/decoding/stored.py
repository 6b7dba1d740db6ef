"""Stored measurements of an engine (baseline or candidate): the samples of a round, and the measurements made only once.

`ResultFolder` saves the results of samples as they finish, so that an interrupted measurement can resume.

A round's directory contains `round.json` (`Round`), `statistics.safetensors` (`StepStatistics` by sample id, one row per field)
and `logprobs.safetensors` (see `distances.distance`). The last file has all samples of a baseline, or the repeated samples of a
candidate. `refuse_weak` refuses workloads whose right answers are improbable under the baseline, because a candidate's losses
would not show there.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, InstanceOf
from safetensors.numpy import load, load_file, save, save_file

from stages.core.errors import GateRefusal, short
from stages.core.records import Sample
from stages.core.redaction import printable, redact_text
from stages.evaluate.distances.distance import LOGPROB_ARRAYS, Array, SampleLogProbs, StepStatistics, collect_statistics
from stages.evaluate.inputs.tokens import EncodedSample
from stages.policies.scales import ScaleChange
from stages.verdict.conformance import EngineConformance
from stages.verdict.coverage import Exercised
from stages.verdict.report import EngineTests

LOGPROBS = "logprobs.safetensors"
STATISTICS = "statistics.safetensors"
STEPS = "/steps"
"""End of the key of a sample's statistics."""
ROUND = "round.json"
TESTS = "tests.json"
FILE = re.compile(r"(\d+)-([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """The result of a sample whose sequences have all ended."""

    sample: int
    answer: tuple[int, ...] | None
    """Greedy answer including its stop token; None if the sample is not judged or no answer was requested."""
    trace: Exercised
    statistics: StepStatistics = field(default_factory=lambda: collect_statistics([]))
    """Statistics of the sample's reference tokens; empty until the steps are scored."""
    logprobs: SampleLogProbs | None = None
    """The engine's own log-probabilities, if they are recorded."""


@dataclass(frozen=True)
class JudgedAnswer:
    """A generated answer, and whether it is right."""

    text: str
    correct: bool
    tokens: tuple[int, ...] = ()
    """Tokens including the stop token; an answer that reached its limit has no stop token."""
    passes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Drafter -> (tokens of the answer including the stop token, target passes that produce them)."""


def probability(nll: Array, item: EncodedSample) -> float:
    """Return the product of the reference tokens' probabilities, or its mean over the sample's scored `results`, if any."""
    parts = item.results or ((0, len(nll)),)
    return float(np.mean([np.exp(-nll[start:stop].sum()) for start, stop in parts]))


class ResultFolder:
    """A directory with one result file per sample.

    A file's name has the sample's index and the SHA-256 digest of its bytes, so that a partly written file is recognized. A
    directory belongs to one list of samples.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, result: SampleResult) -> None:
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "statistics": np.stack(result.statistics),
            "trace": np.array(list(vars(result.trace).values()), np.int64),
        }
        if result.answer is not None:
            arrays["answer"] = np.array(result.answer, np.int64)
        if result.logprobs is not None:
            arrays |= vars(result.logprobs)
        content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        (self.directory / f"{result.sample}-{hashlib.sha256(content).hexdigest()}.safetensors").write_bytes(content)

    def load(self) -> dict[int, SampleResult]:
        """Return the saved results by sample index. Delete files that do not match the digest in their name."""
        results = {}
        for path in sorted(self.directory.iterdir()):
            name = FILE.fullmatch(path.name)
            content = path.read_bytes()
            if name is None or hashlib.sha256(content).hexdigest() != name[2]:
                path.unlink()
                continue
            arrays = load(content)
            sample = int(name[1])
            results[sample] = SampleResult(
                sample=sample,
                answer=tuple(arrays["answer"].tolist()) if "answer" in arrays else None,
                trace=Exercised(*arrays["trace"].tolist()),
                statistics=StepStatistics(*arrays["statistics"]),
                logprobs=SampleLogProbs(**{name: arrays[name] for name in LOGPROB_ARRAYS}) if "logp" in arrays else None,
            )
        return results


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
    """Raise GateRefusal if a workload's right answers have a mean probability below `minimum` in the baseline's round 1.

    The message has further lines with some of the answers.
    """
    workloads: dict[str, list[tuple[Sample, JudgedAnswer, float]]] = {}
    for item in measured.scored(encoded):
        sample = item.sample
        answer = measured.answers.get(sample.id)
        if answer is not None:
            chance = probability(measured.statistics[sample.id].baseline_nll, item)
            workloads.setdefault(sample.workload, []).append((sample, answer, chance))
    weak = list[str]()
    shown: list[tuple[Sample, str]] = []
    for name, answers in sorted(workloads.items()):
        mean = fmean(chance for *_, chance in answers)
        if not mean >= minimum:
            right = sum(answer.correct for _, answer, _ in answers)
            weak.append(
                f"{right} of {len(answers)} questions of {name} (mean probability of the references {100 * mean:.2g} %)"
            )
            # If most answers are right, the model words them differently from the references.
            mostly_right = 2 * right > len(answers)
            shown += [(sample, answer.text) for sample, answer, _ in answers if answer.correct == mostly_right]
    if weak:
        these = "this workload" if len(weak) == 1 else "these workloads"
        message = (
            f"FP16 itself answers {'; '.join(weak)}: {these} cannot be judged, and no candidate was run; "
            f"gates.min_baseline_probability is {100 * minimum:g} %; {ASK_OTHERS}"
        )
        raise GateRefusal("\n".join([message, *(_describe_answer(*answer) for answer in shown[:SHOWN_ANSWERS])]))


ASK_OTHERS = (
    "ask questions that this model answers: leave a workload out with workloads.samples.NAME=0, or a length of "
    "workloads.lengths; or take workloads=chat calibration=chat, or your own, a JSON object per line, as workloads=jsonl "
    "workloads.jsonl=FILE. If its answers are right in other words, use check mention and word the references as the model "
    "does; an example turn in `messages` shows it the form (docs/questions.md#my-questions)"
)
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
