"""Crashes and Ctrl-C end a measurement, which then resumes, with the same results as an uninterrupted measurement."""

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
    found = joined(encode_rounds(SAMPLES, CharTokenizer(), BRIEF), [(baseline, round_dir)], BRIEF)
    timeless = {"system": None, "baseline_system": None, "coverage": None}
    return JoinedEvaluation(found.report.model_copy(update=timeless), found.rows)


@pytest.fixture(scope="module")
def whole(baseline: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SharingFake]:
    """The directory of an uninterrupted round, and its engine."""
    out = tmp_path_factory.mktemp("whole")
    return out, run(baseline, out)


@pytest.mark.parametrize(("at", "fault"), [(1, RuntimeError), (60, KeyboardInterrupt), (150, RuntimeError)])
def test_a_round_resumes_with_missing_or_damaged_samples(
    at: int, fault: type[BaseException], baseline: Path, whole: tuple[Path, SharingFake], tmp_path: Path
) -> None:
    with pytest.raises(fault):
        run(baseline, tmp_path, at, fault)
    kept = sorted((tmp_path / UNFINISHED).glob("*/*"))
    assert bool(kept) == (at > 1)
    if at == 150:
        first, second, third, *kept = kept
        content = bytearray(first.read_bytes())
        content[-1] ^= 1
        first.write_bytes(content)
        second.write_bytes(second.read_bytes()[:100])
        third.rename(third.with_name("7.part"))
    asked, of_all = (len([prompt for prompt in one.prefilled if prompt]) for one in (run(baseline, tmp_path), whole[1]))
    assert asked == of_all - len(kept)
    assert report(baseline, tmp_path) == report(baseline, whole[0])
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in whole[0].iterdir()}
