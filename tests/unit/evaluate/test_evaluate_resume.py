"""Crashes and Ctrl-C end a measurement, which then resumes, with the same results as an uninterrupted measurement."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from helpers.engines.fake import CharTokenizer, SharingFake, sharing_engine
from helpers.verdicts.evaluations import brief_workloads, joined, measure_baseline, measure_candidate, samples

from stages.evaluate.decoding.results import UNFINISHED
from stages.evaluate.inputs.tokens import encode_rounds
from stages.evaluate.joining import JoinedEvaluation
from stages.verdict.report import EvaluationReport
from stages.workloads.config import WorkloadsConfig

SAMPLES = samples(12)
CONFIG: WorkloadsConfig = brief_workloads()


@dataclass
class Interrupted(SharingFake):
    """An engine that calls `fault` before the decode steps numbered in `at`."""

    at: tuple[int, ...] = ()
    fault: Callable[[], None] | None = None

    def decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        if len(self.widths) in self.at and self.fault is not None:
            self.fault()
        return super().decode(sequences, tokens)


def engine(at: tuple[int, ...] = (), fault: Callable[[], None] | None = None) -> SharingFake:
    plain = sharing_engine(SAMPLES, wrong=["find-1", "copy-5"], noise=0.3)
    if fault is None:
        return plain
    return Interrupted(plain.answers, plain.wrong, noise=0.3, at=at, fault=fault)


def crash() -> None:
    raise RuntimeError("power cut")


def control_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("baseline")
    measure_baseline(lambda: sharing_engine(SAMPLES), SAMPLES, out)
    return out


def run(baseline: Path, out: Path, *engines: SharingFake) -> None:
    """Run a round. The given engines are opened in turn, followed by sound engines."""
    left = list(engines)
    measure_candidate(lambda: left.pop(0) if left else engine(), SAMPLES, baseline, out)


def report(baseline: Path, round_dir: Path) -> JoinedEvaluation:
    return joined(encode_rounds(SAMPLES, CharTokenizer(), CONFIG), [(baseline, round_dir)], CONFIG)


def untimed(found: EvaluationReport) -> EvaluationReport:
    """Return a report without times and without coverage, which depends on the samples decoded together."""
    return found.model_copy(update={"system": None, "baseline_system": None, "coverage": None})


def assert_like_an_uninterrupted_run(baseline: Path, resumed: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run(baseline, whole)
    expected, found = report(baseline, whole), report(baseline, resumed)
    assert untimed(found.report) == untimed(expected.report)
    assert found.rows == expected.rows
    assert {path.name for path in resumed.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.parametrize(("at", "fault"), [(1, crash), (9, crash), (40, crash), (9, control_c)])
def test_an_interrupted_round_stops_at_once_and_goes_on_with_the_samples_that_are_missing(
    at: int, fault: Callable[[], None], baseline: Path, tmp_path: Path
) -> None:
    out, faulty, again, whole = tmp_path / "round", engine((at,), fault), engine(), engine()
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        run(baseline, out, faulty)
    assert len(faulty.widths) == at
    assert faulty.live > 0
    kept = len(list((out / UNFINISHED).glob("*/*")))
    run(baseline, out, again)
    run(baseline, tmp_path / "whole", whole)
    asked, of_all = (len([prompt for prompt in one.prefilled if prompt]) for one in (again, whole))
    assert asked == of_all - kept
    assert kept > 0 or at == 1
    assert_like_an_uninterrupted_run(baseline, out, tmp_path)


def test_a_damaged_result_is_measured_again(baseline: Path, tmp_path: Path) -> None:
    out = tmp_path / "round"
    with pytest.raises(RuntimeError):
        run(baseline, out, engine((40,), crash))
    first, second, third, *_ = sorted((out / UNFINISHED).glob("*/*"))
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:100])
    third.rename(third.with_name("7.part"))
    run(baseline, out)
    assert_like_an_uninterrupted_run(baseline, out, tmp_path)
