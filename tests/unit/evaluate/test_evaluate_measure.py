"""Baseline and candidate end to end on an engine without a model: reports, rows, noise floor and must-fail control."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engines.fake import CharTokenizer, fake_engine
from helpers.verdicts.evaluations import SAMPLES, evaluate, measure_baseline

from stages.core.errors import UserError
from stages.core.records import Sample
from stages.evaluate.decoding.system import _processor_seconds, measure_system
from stages.verdict.gates.decide import decide
from stages.verdict.report import EvaluationReport, SampleRow, load_report, load_rows
from stages.verdict.verdict import Thresholds, Verdict
from stages.workloads.config import CONTROL_FACTOR, LoadConfig

GATES = Thresholds()
Judged = tuple[EvaluationReport, list[SampleRow], Verdict]


def check_progress(label: str, done: int, total: int) -> None:
    """A progress callback that asserts plausible arguments."""
    assert label
    assert 0 <= done <= total


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a measured baseline that gets two answers wrong."""
    out = tmp_path_factory.mktemp("baseline")
    measure_baseline(
        lambda: fake_engine(SAMPLES, wrong=["find-0", "copy-0"], batch_noise=1e-3), SAMPLES, out, progress=check_progress
    )
    return out


def candidate(baseline: Path, out: Path, wrong: tuple[str, ...] = ("find-0", "copy-0"), **options: Any) -> Judged:
    options = {"batch_noise": 1e-3, **options}
    evaluate(lambda: fake_engine(SAMPLES, wrong=wrong, **options), SAMPLES, baseline, out, progress=check_progress)
    report, rows = load_report(out), load_rows(out)
    return report, rows, decide(report, rows, GATES)


@pytest.fixture(scope="module")
def same(baseline: Path, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """The baseline's engine judged against itself."""
    return candidate(baseline, tmp_path_factory.mktemp("same"))


def test_the_baseline_as_its_own_candidate_has_no_distance(same: Judged) -> None:
    report, rows, verdict = same
    uncompared = "all: no engine was compared with its reference engine, so no PASS is possible"
    assert (verdict.status, verdict.reasons) == ("INCONCLUSIVE", [uncompared])
    sizes = {(s.workload, s.context): s.samples for s in report.slices}
    assert len(sizes) == len(report.slices)
    assert sizes[None, (0, 6)] + sizes[None, (6, 12)] == sizes[None, None] == len(SAMPLES)
    assert ("copy", (6, 12)) not in sizes, "empty bins are left out"
    assert report.overall.fidelity.kl_max == pytest.approx(0.0, abs=1e-9)
    assert report.overall.fidelity.top1_agreement == 1.0
    assert (report.engine_digest, report.baseline_digest, report.samples) == ("engine", "base", len(SAMPLES))
    assert [row.id for row in rows] == [sample.id for sample in SAMPLES]
    assert report.coverage is not None
    assert 19 <= report.coverage.longest_context < report.coverage.room == 36, "find-11 and 16 more tokens"


def test_the_noise_floor_repeats_samples_in_other_batches(baseline: Path) -> None:
    noise = json.loads((baseline / "tests.json").read_text(encoding="utf-8"))["noise"]
    # no sample is prose; find-11 is the longest sample with an answer
    repeated = [*SAMPLES[:3], SAMPLES[11], *SAMPLES[32:36]]
    assert noise["tokens"] == sum(len(sample.reference) + 1 for sample in repeated)
    assert 0 < noise["kl_mean"] < 1e-4


def test_accuracy_counts_lost_and_gained_answers(baseline: Path, tmp_path: Path) -> None:
    report, rows, _ = candidate(baseline, tmp_path, wrong=("find-1", "find-2", "find-4", "copy-0"))
    part = report.slice("find")
    assert part is not None
    assert part.accuracy is not None
    assert (part.accuracy.lost, part.accuracy.gained, part.accuracy.judged) == (3, 1, 32)
    assert part.accuracy.baseline == pytest.approx(31 / 32)
    row = next(r for r in rows if r.id == "find-1")
    assert row.baseline_generation == '{"k":1}'
    assert report.metrics["quality/find/accuracy_baseline"] == part.accuracy.baseline


def test_the_probability_of_an_answer_is_the_product_over_its_tokens(baseline: Path, tmp_path: Path) -> None:
    report, rows, _ = candidate(baseline, tmp_path, noise=0.5)
    for row in rows:
        if row.workload == "tale":
            assert (row.baseline_probability, row.candidate_probability) == (None, None)
        else:
            for nll, product in ((row.baseline_nll, row.baseline_probability), (row.candidate_nll, row.candidate_probability)):
                assert nll is not None
                assert product == pytest.approx(np.exp(-nll * row.scored_tokens), rel=1e-9)
    accuracy = report.overall.accuracy
    assert accuracy is not None
    assert accuracy.baseline_probability == pytest.approx(np.mean([r.baseline_probability for r in rows if r.judged]))
    recovery = sum(r.candidate_probability or 0 for r in rows) / sum(r.baseline_probability or 0 for r in rows)
    assert report.metrics["quality/recovery"] == accuracy.recovery == pytest.approx(recovery)


def test_non_finite_logits_fail_a_candidate_and_refuse_a_baseline(baseline: Path, tmp_path: Path) -> None:
    report, rows, verdict = candidate(baseline, tmp_path, not_a_number=True)
    assert verdict.status == "FAIL"
    assert report.overall.fidelity.kl_mean is None
    assert "quality/kl_mean" not in report.metrics, "only finite numbers are metrics"
    assert rows[0].non_finite_steps == rows[0].scored_tokens
    assert rows[0].baseline_probability is not None
    assert rows[0].candidate_probability is None
    with pytest.raises(UserError, match="the baseline's logits are not finite"):
        measure_baseline(lambda: fake_engine(SAMPLES, not_a_number=True), SAMPLES, tmp_path / "baseline")
    assert "quality/recovery" not in report.metrics


def test_the_must_fail_control_runs_last_and_detects_an_unread_cache(baseline: Path, tmp_path: Path) -> None:
    _, _, verdict = candidate(baseline, tmp_path / "blind", blind=True)
    assert [check.gate for check in verdict.checks if check.status == "FAIL"] == ["must_fail_control"]
    engine = fake_engine(SAMPLES)
    report = evaluate(lambda: engine, SAMPLES, baseline, tmp_path / "sound")
    assert (engine.key_scale, engine.live) == (CONTROL_FACTOR, 0)
    assert report.tests.noise is not None
    assert report.tests.noise.kl_max == pytest.approx(0.0, abs=1e-9), "measured before the corruption"


def test_system_metrics_are_measured_under_the_fixed_load(same: Judged) -> None:
    report, _, _ = same
    system = report.tests.system
    assert system.kib_per_token == 2 * 1 * 2 * 16 * 2 / 1024  # layers, heads, keys and values, head_dim, bytes
    assert system.kib_per_token_allocated == system.kib_per_token
    assert system.max_live_tokens == 2**30 // (1024 * 128) * 1024
    percentiles = [p or 0.0 for p in (system.inter_token_p50_ms, system.inter_token_p95_ms, system.inter_token_p99_ms)]
    assert 0 < percentiles[0] <= percentiles[1] <= percentiles[2]


def test_the_share_of_other_programs_excludes_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s of all processors, the hypervisor took 1 s, other programs 1 s, this process 1 s, and 7 s were idle."""
    monkeypatch.setattr("psutil.cpu_times", lambda: (1.0, 0.0, 1.0, 6.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0))
    monkeypatch.setattr("stages.evaluate.decoding.system.time.process_time", lambda: 1.0)
    assert _processor_seconds() == pytest.approx((2.0, 10.0))
    engine = fake_engine(SAMPLES)
    assert measure_system(engine, LoadConfig(batch=2, context_tokens=4, new_tokens=4)).others_share is None, "no time passed"


class SeparatorTokenizer(CharTokenizer):
    """A tokenizer that encodes U+2028 as `~`. `str.splitlines` treats U+2028 as a line end."""

    def text_ids(self, text: str) -> list[int]:
        return super().text_ids(text.replace("\u2028", "~"))

    def text(self, token_ids: Sequence[int]) -> str:
        return super().text(token_ids).replace("~", "\u2028")


def test_reserved_ids_and_line_separators_round_trip(tmp_path: Path) -> None:
    names = ("s\x85", "__metadata__")
    separated = [Sample(id=name, workload="copy", prompt=f"c{i}", reference=f"{i}\u2028{i}") for i, name in enumerate(names)]
    plain = [replace(sample, reference=sample.reference.replace("\u2028", "~")) for sample in separated]
    baseline_dir, out = tmp_path / "baseline", tmp_path / "report"
    measure_baseline(lambda: fake_engine(plain), separated, baseline_dir, tokenizer=SeparatorTokenizer())
    evaluate(lambda: fake_engine(plain), separated, baseline_dir, out, tokenizer=SeparatorTokenizer())
    assert [(row.id, row.baseline_generation) for row in load_rows(out)] == [(s.id, s.reference) for s in separated]
    assert all(row.baseline_correct and row.candidate_correct for row in load_rows(out))
