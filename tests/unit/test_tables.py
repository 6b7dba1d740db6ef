"""What a run prints at its end."""

from pathlib import Path

import pytest
from judged_candidates import judged_candidate

from pipeline.registry.summary import Candidate, Registration
from pipeline.registry.tracking import Tracking, locate
from pipeline.terminal.tables import print_baseline_accuracy, print_comparison, print_mlflow

UNGRADED = {
    "quality/accuracy_baseline": 0.9,
    "quality/copy/accuracy_baseline": 0.9,
    "quality/copy/early/accuracy_baseline": 0.8,
}
GRADED = {
    "quality/lookup/accuracy_baseline": 0.75,
    "quality/lookup/accuracy_judged": 120.0,
    "quality/lookup/easy/accuracy_baseline": 0.95,
    "quality/lookup/hard/accuracy_baseline": 0.55,
}


def printed(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_graded_workload_shows_the_baselines_accuracy_by_difficulty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_baseline_accuracy([judged_candidate(tmp_path, name, metrics=UNGRADED | GRADED) for name in ("fp8", "int8")])
    lines = printed(capsys)
    assert lines.count(["lookup", "120", "0.750", "0.950", "-", "0.550"]) == 1
    assert not [line for line in lines if "copy" in line]


def test_workloads_without_difficulties_print_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_baseline_accuracy([judged_candidate(tmp_path, "fp8", metrics=UNGRADED)])
    assert printed(capsys) == []


def test_tokens_a_pass_are_columns_where_they_were_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafted = {"quality/acceptance_lookup_baseline": 3.456, "quality/acceptance_lookup_candidate": 2.718}
    print_comparison([judged_candidate(tmp_path, "int8", metrics=UNGRADED), judged_candidate(tmp_path, "fp8", metrics=drafted)])
    lines = {line[0]: line for line in printed(capsys) if line}
    assert lines["policy"][-1] == "lookup"
    assert (lines["fp8"][-1], lines["int8"][-1]) == ("2.72", "-")
    print_comparison([judged_candidate(tmp_path, "fp8", metrics=UNGRADED)])
    assert not [line for line in printed(capsys) if "lookup" in line]


def test_one_run_gets_the_address_of_its_page_and_several_that_of_their_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    location = locate(Tracking(), tmp_path, "tiny", {})

    def registered(policy: str) -> Candidate:
        registration = Registration(run_id=f"run-{policy}", model_version="1")
        return judged_candidate(tmp_path, policy, metrics={}).model_copy(update={"registration": registration})

    print_mlflow(location, "7", [registered("fp8")], "sweep-1")
    assert "/#/experiments/7/runs/run-fp8?" in capsys.readouterr().out
    print_mlflow(location, "7", [registered("fp8"), registered("int8")], "sweep-1")
    out = capsys.readouterr().out
    assert "/#/experiments/7/runs?searchFilter=tags.sweep%20%3D%20%27sweep-1%27&" in out
    assert "run-" not in out


def test_the_spread_of_decode_tokens_is_a_column_where_it_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spread = {"perf/decode_tokens_per_s_slow": 1141.2, "perf/decode_tokens_per_s_fast": 3600.9}
    older = judged_candidate(tmp_path, "int8", metrics={"perf/decode_tokens_per_s": 2308.2, "perf/inter_token_p95_ms": 7.0})
    newer = judged_candidate(tmp_path, "fp8", metrics={"perf/decode_tokens_per_s": 3024.6} | spread)
    print_comparison([older, newer])
    lines = {line[0]: line for line in printed(capsys) if line}
    assert (lines["int8"][-2:], lines["fp8"][-2:]) == (["2308", "-"], ["3025", "1141-3601"])
    print_comparison([older])
    assert next(line for line in printed(capsys) if line[:1] == ["int8"])[-1] == "2308"
