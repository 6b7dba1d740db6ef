"""The verdict: what passes, what fails, what is left open, and that neither gaps nor noise ever pass."""

from typing import Any

import numpy as np
import pytest
from gate_reports import CANARY_ROWS, CLASSES, GATES, answered, every_class, fidelity, gates, report, row, verdict
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.core.errors import UserError
from pipeline.verdict.conformance import Conformance, EngineConformance
from pipeline.verdict.gates import decide
from pipeline.verdict.report import Canary, Compaction, NoiseFloor, Rung, SampleRow
from pipeline.verdict.thresholds import Verdict


def test_an_engine_that_flips_nothing_passes_and_says_what_was_shown() -> None:
    outcome = verdict(every_class())
    assert outcome.status == "PASS"
    assert len(outcome.reasons) == len(CLASSES)
    assert outcome.reasons[0].startswith("copy: 0 of 128 answers lost, 0 gained; accuracy 1.000 vs 1.000")
    assert outcome.samples_needed == {}


def prose(count: int) -> list[SampleRow]:
    return [row("prose", i, judged=False, baseline_correct=None, candidate_correct=None) for i in range(count)]


def test_prose_without_answers_is_judged_by_its_distances_only() -> None:
    assert verdict(every_class() + prose(24)).status == "PASS"


def test_a_few_samples_without_answers_are_no_evidence() -> None:
    outcome = verdict(prose(2))
    assert outcome.status == "INCONCLUSIVE"
    assert outcome.reasons[0] == "all: no sample has an answer to judge, 2 documents have distances; gates.min_samples is 32"
    assert "prose: mean KL 0.0009766, 95.5 % bound 0.1" in outcome.reasons[1]
    assert outcome.samples_needed == {"all": 32}


def test_enough_samples_without_answers_pass_by_their_distances_and_say_so() -> None:
    outcome = verdict(prose(160))
    assert outcome.status == "PASS"
    assert outcome.samples_needed == {}
    assert "160 documents have distances" in outcome.reasons[0]
    assert any(reason.startswith("prose: mean KL 0.0009766") for reason in outcome.reasons)


def test_many_samples_of_few_documents_are_not_enough_without_answers() -> None:
    rows = [r.model_copy(update={"document": f"d{i % 4}"}) for i, r in enumerate(prose(64))]
    assert verdict(rows).status == "INCONCLUSIVE"


@pytest.mark.parametrize("name", ["retreival", "prose"])
def test_a_margin_of_a_workload_without_answers_is_refused(name: str) -> None:
    with pytest.raises(UserError) as caught:
        verdict(every_class() + prose(24), gates(margins={name: 0.02}))
    assert str(caught.value) == (
        f"gates.margins.{name}=0.02: {name} has no answers to judge; copy, multi_turn, retrieval, tool_call could have a margin"
    )


@pytest.mark.parametrize(
    ("lost", "status"), [(0, "PASS"), (1, "PASS"), (2, "PASS"), (5, "INCONCLUSIVE"), (10, "INCONCLUSIVE"), (20, "FAIL")]
)
def test_lost_answers_move_the_verdict_from_pass_over_inconclusive_to_fail(lost: int, status: str) -> None:
    assert verdict(every_class(retrieval=lost)).status == status


def test_one_failing_class_fails_under_holm_and_is_named_with_its_numbers() -> None:
    outcome = verdict(every_class(retrieval=25))
    assert outcome.status == "FAIL"
    assert outcome.reasons[0].startswith(
        "retrieval: 25 of 128 answers lost, 0 gained; accuracy 0.805 vs 1.000, upper 98.75 % bound -0.12"
    )
    assert outcome.reasons[0].endswith("below the margin -0.050")
    statuses = {c.where: c.status for c in outcome.checks if c.gate == "accuracy" and "[" not in c.where}
    assert statuses == {"retrieval": "FAIL", "tool_call": "PASS", "copy": "PASS", "multi_turn": "PASS"}


def test_a_pass_asks_the_same_of_each_class_however_many_there_are() -> None:
    alone = answered("retrieval", 66)
    assert verdict(alone, gates(max_ruined_share=0.05)).status == "PASS"
    four = [r for name in CLASSES for r in answered(name, 66)]
    assert verdict(four).status == "PASS"
    assert verdict([r for r in four if r.workload != "copy"] + answered("copy", 58)).status == "INCONCLUSIVE"


def test_holm_asks_more_of_a_fail_when_there_are_more_classes() -> None:
    def copy_status(*others: str) -> str:
        rows = answered("copy", 100, lost=11) + [r for name in others for r in answered(name, 100)]
        return next(c.status for c in verdict(rows).checks if c.where == "copy" and c.gate == "accuracy")

    assert copy_status() == "FAIL"
    assert copy_status("retrieval", "tool_call", "multi_turn") == "INCONCLUSIVE"


def test_a_tighter_margin_of_one_workload_needs_more_samples_there() -> None:
    outcome = verdict(every_class(), gates(margins={"retrieval": 0.02}))
    assert outcome.status == "INCONCLUSIVE"
    assert outcome.samples_needed["retrieval"] > outcome.samples_needed["copy"] > 128, "copy passed, by an easier test"
    more = [r for name, count in outcome.samples_needed.items() for r in answered(name, count)]
    more += [r for r in every_class() if r.workload not in outcome.samples_needed]
    assert verdict(more, gates(margins={"retrieval": 0.02}, attempt=2)).status == "PASS"


def test_too_few_samples_never_pass() -> None:
    outcome = verdict([r for r in every_class() if r.workload != "copy"] + answered("copy", 10))
    assert outcome.status == "INCONCLUSIVE"
    assert "gates.min_samples is 32" in outcome.reasons[0]


def test_a_workload_that_the_baseline_cannot_do_is_no_evidence_that_the_candidate_can() -> None:
    hopeless = [row("tool_call", i, before=i < 5, after=i < 5) for i in range(160)]
    judged = verdict([*answered("retrieval", 160), *hopeless])
    assert judged.status == "INCONCLUSIVE"
    assert "tool_call" in judged.reasons[0]
    assert "the baseline is right too rarely" in judged.reasons[0]
    assert judged.samples_needed == {}, "more of the same samples would not help"
    assert verdict([*answered("retrieval", 160), *hopeless], gates(min_baseline_accuracy=0.0)).status == "PASS"


def test_a_context_bin_can_fail_while_its_workload_is_open() -> None:
    # the 12 losses are all in the 64 samples of the bin [0, 150); 12 of 128 alone would be open
    rows = [r.model_copy(update={"context_tokens": 100 if i < 25 else 900}) for i, r in enumerate(every_class())]
    losing = [r.model_copy(update={"candidate_correct": i >= 12}) if r.workload == "retrieval" else r
              for i, r in enumerate(rows)]  # fmt: skip
    outcome = verdict(losing)
    assert outcome.status == "FAIL"
    assert outcome.reasons[0].startswith("retrieval [0, 150): 12 of 25 answers lost")


def test_a_small_bin_without_losses_does_not_stop_a_pass() -> None:
    rows = [r.model_copy(update={"context_tokens": 100 if i == 0 else 900}) for i, r in enumerate(every_class())]
    assert verdict(rows).status == "PASS"


@pytest.mark.parametrize(
    ("changes", "gate"),
    [
        ({"mean_kl": 0.15}, "max_mean_kl"),
        ({"top10_overlap": 0.5}, "min_top10_overlap"),
        ({"candidate_nll": 0.5}, "max_ppl_ratio"),
        ({"mean_squared_delta_p": 0.2}, "max_rms_delta_p"),
    ],
)
def test_each_distance_fails_alone(changes: dict[str, Any], gate: str) -> None:
    rows = [r for r in every_class() if r.workload != "copy"] + answered("copy", 128, **changes)
    outcome = verdict(rows)
    assert outcome.status == "FAIL"
    assert [(c.gate, c.where) for c in outcome.checks if c.status == "FAIL"] == [(gate, "copy")]


def test_a_distance_whose_bounds_straddle_the_threshold_is_inconclusive() -> None:
    rows = every_class()
    spread = [r.model_copy(update={"mean_kl": 0.001 if i % 2 else 0.09}) for i, r in enumerate(rows)]
    outcome = verdict(spread)
    assert outcome.status == "INCONCLUSIVE"
    assert "not clearly within max_mean_kl" in outcome.reasons[0]


def test_a_bound_by_document_is_wider_than_by_sample() -> None:
    rows = [
        r.model_copy(update={"mean_kl": 0.02 if i < 64 else 0.06, "document": f"d{i // 64}-{r.workload}"})
        for r, i in ((r, int(r.id.rpartition("-")[2])) for r in every_class())
    ]
    apart = [r.model_copy(update={"document": r.id}) for r in rows]
    by_document, by_sample = (next(c for c in verdict(some).checks if c.gate == "max_mean_kl") for some in (rows, apart))
    assert (by_document.status, by_sample.status) == ("INCONCLUSIVE", "PASS")
    assert by_document.bound is not None
    assert by_sample.bound is not None
    assert by_document.bound > by_sample.bound


def test_samples_of_few_documents_count_as_few_samples() -> None:
    rows = [r.model_copy(update={"document": f"{r.workload}-{i % 8}"}) for i, r in enumerate(every_class())]
    assert verdict(rows).status == "INCONCLUSIVE"


@pytest.mark.parametrize(("every", "status"), [(8, "FAIL"), (100, "WARNING"), (10_000, "PASS")])
def test_the_share_of_tokens_far_away_has_to_be_shown_small(every: int, status: str) -> None:
    """One row in `every` has ten tokens of a hundred above gates.max_p999_kl; a thousandth may be."""
    rows = every_class()
    outcome = verdict([r.model_copy(update={"kl_tail": [9.0] * 10 if i % every == 0 else []}) for i, r in enumerate(rows)])
    assert [c.status for c in outcome.checks if c.gate == "max_p999_kl"] == [status]
    assert outcome.status == ("FAIL" if status == "FAIL" else "PASS")
    assert len(outcome.warnings) == (status == "WARNING")


def test_a_few_texts_beside_answers_warn_and_fail_but_never_keep_from_passing() -> None:
    few = verdict(every_class() + prose(4))
    assert few.status == "PASS"
    assert [text.split(":")[0] for text in few.warnings] == ["prose"] * 4
    broken = [r.model_copy(update={"mean_kl": 3.0}) for r in prose(4)]
    assert verdict(every_class() + broken).status == "FAIL"
    assert verdict(every_class() + prose(24)).warnings == []


@pytest.mark.parametrize(("ruined", "status"), [(0, "PASS"), (3, "PASS"), (10, "INCONCLUSIVE"), (40, "FAIL")])
def test_ruined_requests_are_counted_whatever_their_kl(ruined: int, status: str) -> None:
    rows = [r.model_copy(update={"mean_kl": 9.0}) if i < ruined else r for i, r in enumerate(every_class())]
    outcome = verdict(sorted(rows, key=lambda r: r.id[::-1]))
    line = next(c for c in outcome.checks if c.gate == "max_ruined_share")
    assert line.status == status
    assert line.reason.startswith(f"all: requests with a mean KL above 0.2: {ruined} of 512, share {ruined / 512:.4g}")


def test_zero_ruined_requests_are_bounded_by_the_rule_of_three() -> None:
    line = next(c for c in verdict(every_class()).checks if c.gate == "max_ruined_share")
    assert line.bound == pytest.approx(1 - 0.045 ** (1 / 512))


def test_one_ruined_request_does_not_decide_a_mean() -> None:
    rows = every_class()
    rows[0] = rows[0].model_copy(update={"mean_kl": 60.0})
    assert verdict(rows).status == "PASS"


def test_a_slope_through_two_documents_decides_nothing() -> None:
    unjudged: dict[str, Any] = {"judged": False, "baseline_correct": None, "candidate_correct": None}
    short, long = (
        row("prose", 0, **unjudged),
        row("prose", 1, **unjudged).model_copy(update={"context_tokens": 1100, "mean_kl": 0.04}),
    )
    assert verdict([short, long]).status == "INCONCLUSIVE"


def test_a_distance_that_grows_with_the_context_fails_at_the_slope() -> None:
    rows = [r.model_copy(update={"mean_kl": 1e-4 * r.context_tokens}) for r in every_class()]
    outcome = verdict(rows)
    assert outcome.status == "FAIL"
    assert {(c.gate, c.where) for c in outcome.checks if c.status == "FAIL"} == {("max_kl_slope", name) for name in CLASSES}
    assert next(c.value for c in outcome.checks if c.gate == "max_kl_slope") == pytest.approx(0.1)


def test_a_growth_that_is_not_shown_small_is_a_warning_and_nothing_more() -> None:
    rng = np.random.default_rng(0)
    rows = [
        r.model_copy(update={"mean_kl": float(kl)}) for r, kl in zip(every_class(), rng.exponential(0.02, 512), strict=True)
    ]
    outcome = verdict([r.model_copy(update={"context_tokens": 300 + r.context_tokens // 50}) for r in rows])
    assert outcome.status == "PASS"
    assert outcome.warnings
    assert all("growth of KL per 1k tokens" in text and "not clearly within max_kl_slope" in text for text in outcome.warnings)


@pytest.mark.parametrize("field", ["mean_kl", "candidate_nll", "top10_overlap", "mean_squared_delta_p", "max_kl"])
def test_a_number_that_is_missing_fails(field: str) -> None:
    rows = every_class()
    rows[3] = rows[3].model_copy(update={field: None})
    outcome = verdict(rows)
    assert outcome.status == "FAIL"
    assert "retrieval: 1 of 128 samples have no finite numbers" in outcome.reasons[0]


def test_a_nan_that_got_into_a_row_fails() -> None:
    rows = every_class()
    rows[0] = rows[0].model_copy(update={"mean_kl": float("nan")})
    assert verdict(rows).status == "FAIL"


def test_no_samples_fail() -> None:
    outcome = verdict([])
    assert (outcome.status, outcome.reasons) == ("FAIL", ["all: no samples were evaluated"])


def test_rows_that_are_missing_or_doubled_fail() -> None:
    rows = every_class()
    assert decide(report(rows), rows[:-1], GATES).status == "FAIL"
    assert decide(report(rows), [*rows[:-1], rows[0]], GATES).status == "FAIL"


def test_a_failed_verdict_gives_only_what_failed_as_its_reasons() -> None:
    outcome = verdict(every_class(retrieval=25, copy=5))
    assert outcome.reasons[0].startswith("retrieval: 25 of 128")
    assert not any(reason.startswith("copy") for reason in outcome.reasons)
    assert outcome.samples_needed == {}, "copy is open, and more samples of it change nothing"


def test_a_missing_answer_fails() -> None:
    rows = every_class()
    rows[0] = rows[0].model_copy(update={"candidate_correct": None})
    assert verdict(rows).status == "FAIL"


def test_a_canary_that_nobody_noticed_fails_the_candidate() -> None:
    outcome = verdict(every_class(), canary=Canary(factor=0.1, rows=answered("retrieval", 8)))
    assert outcome.status == "FAIL"
    assert "the evaluation does not see the cache" in outcome.reasons[0]


def test_a_canary_that_did_not_run_fails_the_candidate() -> None:
    assert verdict(every_class(), canary=Canary(factor=0.1, rows=[])).status == "FAIL"


def rung(fault: str, kl: float, roundings: float) -> Rung:
    near = {"kl_mean": 1e-12, "kl_max": 1e-12, "logit_difference": 1e-6, "stored_error": 0.0, "stored_mean": 0.0}
    far = {**near, "kl_mean": 1e-12 * roundings**2}
    beside = {"sample": "a", "prompt_tokens": 9, "decoded_tokens": 4, "engine": far, "rounding": near}
    rows = [r.model_copy(update={"mean_kl": kl}) for r in answered("retrieval", 2)]
    return Rung.model_validate({"fault": fault, "rows": rows, "requests": [beside]})


LADDER = [rung("key scale x2", 1.0, 1.0), rung("values x1.1", 1e-3, 1e4), rung("key scale x1.05", 1e-3, 2.0)]


@pytest.mark.parametrize(
    ("compute_dtype", "told"),
    [
        ("float32", "noticed: key scale x2, values x1.1; not: key scale x1.05"),
        (None, "noticed: key scale x2; not: values x1.1, key scale x1.05"),
    ],
)
def test_the_ladder_says_which_small_faults_were_noticed_and_decides_nothing(compute_dtype: str | None, told: str) -> None:
    sound = EngineConformance(policy="fp16", requests=rung("none", 0.0, 1.0).requests)
    conformance = Conformance(compute_dtype=compute_dtype, baseline=sound, candidate=sound)
    canary = Canary(factor=0.1, rows=CANARY_ROWS, ladder=LADDER)
    outcome = verdict(every_class(), canary=canary, conformance=conformance)
    assert outcome.status == "PASS"
    assert f"planted faults {told}" in outcome.reasons


def test_a_report_without_a_ladder_says_nothing_of_one() -> None:
    assert "ladder" not in {check.gate for check in verdict(every_class()).checks}


def test_a_threshold_finer_than_the_noise_floor_decides_nothing() -> None:
    noise = NoiseFloor(samples=4, fidelity=fidelity(kl_mean=0.06), answer_flips=0)
    outcome = verdict(every_class(), noise=noise)
    assert outcome.status == "INCONCLUSIVE"
    assert "max_mean_kl=0.05 is finer than the baseline's own noise" in outcome.reasons[0]


def test_storage_that_misses_a_hundredth_of_the_threshold_decides_nothing() -> None:
    def compacted(difference: float | None) -> Verdict:
        record = Compaction(tokens=100, kl_full=0.02, kl_head=0.02, difference=difference)
        return verdict(every_class(), compaction=record)

    assert compacted(0.0004).status == "PASS"
    for missed in (0.0006, None):
        assert compacted(missed).status == "INCONCLUSIVE"
    assert "miss 0.0006 nats of the mean KL, more than 1% of max_mean_kl=0.05" in compacted(0.0006).reasons[0]


def test_without_a_noise_floor_nothing_passes() -> None:
    unknown = NoiseFloor(samples=0, fidelity=None, answer_flips=0)
    assert verdict(every_class(), noise=unknown).status == "INCONCLUSIVE"


def test_raw_values_are_compared_not_rounded_ones() -> None:
    rows = [r.model_copy(update={"mean_kl": 0.2 + 1e-12 * (i % 100 < 50)}) for i, r in enumerate(every_class())]
    line = next(c for c in verdict(rows).checks if c.gate == "max_ruined_share")
    assert line.value == pytest.approx(262 / 512), "a request is ruined above 0.2, and no earlier"


def test_the_same_input_gives_the_same_verdict() -> None:
    rows = every_class(retrieval=4)
    assert verdict(rows) == verdict(rows)


@settings(max_examples=20, deadline=None)
@given(lost=st.integers(0, 30), gained=st.integers(0, 10), count=st.sampled_from([60, 100]))
def test_one_more_lost_sample_never_turns_a_fail_into_a_pass(lost: int, gained: int, count: int) -> None:
    order = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}
    before = verdict(answered("retrieval", count, lost, gained)).status
    after = verdict([*answered("retrieval", count, lost, gained), row("retrieval", 999, True, False)]).status
    assert not (before == "FAIL" and after == "PASS")
    one_worse = answered("retrieval", count, lost, gained)
    one_worse[-1] = one_worse[-1].model_copy(update={"candidate_correct": False})
    assert order[verdict(one_worse).status] <= order[before]


@pytest.mark.parametrize("changes", [{"max_mean_kl": 0.0}, {"alpha": 0.5}, {"margin": 1.5}, {"max_mean_kls": 1.0}])
def test_impossible_thresholds_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        gates(**changes)
