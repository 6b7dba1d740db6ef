"""dry=true beside the real stages on the tiny model: what it foresees is what a run then makes and reuses."""

from pathlib import Path

import pytest
from dry_runs import check, foreseen, happened, made_titles

from pipeline.config.compose import Plan, plan
from pipeline.dry.command import foretell

BRIEF = [
    "workloads.samples={prose: 1, retrieval: 4, tool_call: 0, copy: 4, multi_turn: 0}",
    "workloads.max_scored_tokens=16",
    "workloads.rounds=[0.5,1.0]",
    "workloads.load={batch: 2, context_tokens: 64, new_tokens: 4, warmup_steps: 1, budget_gib: 1.0, sequence_tokens: 256}",
    "workloads.probe={max_tokens: 128, decode_steps: 8, offset_steps: 1, max_batch: 2, requests: 4}",
    "calibration.samples=4",
    "backend.threads=1",
    "tracking=none",
]


def planned(work: Path, *arguments: str) -> Plan:
    return plan([f"workdir={work}", *BRIEF, *arguments], multirun=True)


def test_a_sweep_makes_and_reuses_what_was_foreseen_and_nothing_the_second_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = planned(tmp_path / "work", "stage=evaluate", "kv=fp8,int4_tensor")
    foretold = foreseen(jobs)
    assert not (tmp_path / "work").exists()
    made = happened(jobs)
    check(foretold, made)
    assert "round fp8 1/2" in made_titles(made)[0]
    assert {"build fp16", "export", "baseline fp16 1/2"} <= {*made_titles(made)[0]} - {*made_titles(made)[1]}

    again = foreseen(jobs)
    assert all(one.reused and one.certain for job in again for one in job)
    check(again, happened(jobs))
    assert foretell(jobs) == 3  # so few samples show nothing
    said = capsys.readouterr()
    assert "int4_tensor is judged already: FAIL" in said.out
    assert "no candidate of the sweep passed" in said.err


def test_what_one_changed_key_makes_anew_is_foreseen(tmp_path: Path) -> None:
    happened(planned(tmp_path / "work", "stage=build", "kv=fp16,int4"))
    more = planned(tmp_path / "work", "stage=build", "kv=int8,fp8")
    foretold = foreseen(more)
    check(foretold, happened(more))
    assert [one.title for one in foretold[0] if one.reused] == ["calibration", "export"]

    other_texts = planned(tmp_path / "work", "stage=build", "kv=fp16,int4,fp8", "calibration.samples=5")
    foretold = foreseen(other_texts)
    made = happened(other_texts)
    check(foretold, made)
    # Scales of int4 come from the tokens themselves, those of fp8 from the texts, which may give the same.
    assert made_titles(made)[1] == ["quantize int4"]
    assert [one.title for one in foretold[2] if not one.certain] == ["quantize fp8", "build fp8"]
