import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.errors import UserError
from pipeline.registry.summary import Candidate, conclude, finish, load, record

FP8 = Candidate("fp8", "PASS", (), 2.0, {"quality/kl_mean": 0.1}, "e", "b", "r", "/e", "/b", "/r", "/s", model_version="3")


def test_the_same_sweep_merges_by_name_and_another_starts_afresh(tmp_path: Path) -> None:
    record(tmp_path, "one", FP8)
    record(tmp_path, "one", replace(FP8, kv="int8"))
    record(tmp_path, "one", replace(FP8, verdict="FAIL"))
    conclude(tmp_path, "int8")
    assert [(c.kv, c.verdict) for c in load(tmp_path).candidates] == [("fp8", "FAIL"), ("int8", "PASS")]
    assert load(tmp_path).champion == "int8"
    summary = record(tmp_path, "two", FP8)
    assert [c.kv for c in summary.candidates] == ["fp8"]
    assert summary.champion is None


def test_candidates_of_one_policy_that_differ_in_something_else_are_both_kept(tmp_path: Path) -> None:
    record(tmp_path, "one", FP8)
    record(tmp_path, "one", replace(FP8, label="fp8 weights=fp8", verdict="FAIL"))
    record(tmp_path, "one", replace(FP8, model="another"))
    assert [(c.model, c.name) for c in load(tmp_path).candidates] == [
        ("", "fp8"),
        ("", "fp8 weights=fp8"),
        ("another", "fp8"),
    ]


def test_a_candidate_survives_the_file(tmp_path: Path) -> None:
    record(tmp_path, "one", replace(FP8, reasons=("a", "b")))
    assert load(tmp_path).candidates == (replace(FP8, reasons=("a", "b")),)


def test_the_exit_code_of_a_sweep_is_its_worst_until_promotion_decides(tmp_path: Path) -> None:
    assert finish(tmp_path, "one", 3).exit_code == 3
    assert finish(tmp_path, "one", 0).exit_code == 3
    assert finish(tmp_path, "one", 1).exit_code == 1
    assert finish(tmp_path, None, 0).exit_code == 0
    assert finish(tmp_path, "two", 0).exit_code == 0


def test_numbers_that_are_not_finite_are_null_in_the_file(tmp_path: Path) -> None:
    record(tmp_path, "one", replace(FP8, kib_per_token=math.nan, metrics={"a": math.inf, "b": 1.0}))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    raw = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert raw["candidates"][0]["metrics"] == {"a": None, "b": 1.0}
    assert raw["candidates"][0]["kib_per_token"] is None
    assert math.isnan(load(tmp_path).candidates[0].kib_per_token)


def test_the_file_has_the_fields_that_ci_relies_on(tmp_path: Path) -> None:
    record(tmp_path, "one", FP8)
    raw = json.loads((tmp_path / "summary.json").read_text())
    assert {"candidates", "champion", "exit_code"} <= raw.keys()
    promised = {"kv", "verdict", "reasons", "kib_per_token", "metrics", "engine_digest", "baseline_digest"}
    assert promised <= raw["candidates"][0].keys()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"candidates": ')
    with pytest.raises(UserError, match=r"summary.json is damaged"):
        load(tmp_path)


def test_no_scratch_file_stays_behind(tmp_path: Path) -> None:
    record(tmp_path, "one", FP8)
    assert {path.name for path in tmp_path.iterdir()} <= {"summary.json", ".summary.json.lock"}
