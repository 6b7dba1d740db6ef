"""A measurement that a crash or Ctrl-C interrupted resumes, with the same results as an uninterrupted measurement."""

from pathlib import Path

import pytest
from helpers.engines.fake import CharTokenizer, SharingFake, sharing_engine
from helpers.verdicts.evaluations import BRIEF, joined, measure_baseline, measure_candidate, samples

from stages.evaluate.inputs.tokens import encode_rounds
from stages.evaluate.joining import JoinedEvaluation
from stages.evaluate.measure import UNFINISHED

SAMPLES = samples(12)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("baseline")
    measure_baseline(lambda: sharing_engine(SAMPLES), SAMPLES, out)
    return out


def run(baseline: Path, out: Path, stop_at: int = 1 << 30, fault: type[BaseException] = RuntimeError) -> SharingFake:
    """Run a round, and raise `fault` once `stop_at` tokens are decoded. Return the engine."""
    engine = sharing_engine(SAMPLES, wrong=["find-1", "copy-5"], noise=0.3)

    def progress(label: str, done: int, total: int) -> None:
        if label.startswith("forced decode") and stop_at <= done < total:
            raise fault

    measure_candidate(lambda: engine, SAMPLES, baseline, out, progress=progress)
    return engine


def report(baseline: Path, round_dir: Path) -> JoinedEvaluation:
    """Return the report without times and without coverage, which depends on the samples decoded together."""
    evaluation = joined(encode_rounds(SAMPLES, CharTokenizer(), BRIEF), [(baseline, round_dir)], BRIEF)
    report = evaluation.report
    untimed = {name: getattr(report, name).model_copy(update={"system": None}) for name in ("tests", "baseline_tests")}
    return JoinedEvaluation(report.model_copy(update={**untimed, "coverage": None}), evaluation.rows)


@pytest.fixture(scope="module")
def uninterrupted(baseline: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SharingFake]:
    """The directory of an uninterrupted round, and its engine."""
    out = tmp_path_factory.mktemp("uninterrupted")
    return out, run(baseline, out)


@pytest.mark.parametrize(("stop_at", "fault"), [(1, RuntimeError), (60, KeyboardInterrupt), (150, RuntimeError)])
def test_a_round_resumes_with_missing_or_damaged_samples(
    stop_at: int, fault: type[BaseException], baseline: Path, uninterrupted: tuple[Path, SharingFake], tmp_path: Path
) -> None:
    with pytest.raises(fault):
        run(baseline, tmp_path, stop_at, fault)
    saved = sorted((tmp_path / UNFINISHED).iterdir())
    assert bool(saved) == (stop_at > 1)
    if stop_at == 150:
        first, second, third, *saved = saved
        content = bytearray(first.read_bytes())
        content[-1] ^= 1
        first.write_bytes(content)
        second.write_bytes(second.read_bytes()[:100])
        third.rename(third.with_name("7.part"))
    engines = (run(baseline, tmp_path), uninterrupted[1])
    resumed, total = (len([prompt for prompt in engine.prefilled if prompt]) for engine in engines)
    assert resumed == total - len(saved)
    assert report(baseline, tmp_path) == report(baseline, uninterrupted[0])
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in uninterrupted[0].iterdir()}
