"""dry=true foresees what a run makes and reuses: of the real chain, over stages that do next to no work."""

import shutil
from pathlib import Path

import pytest
from dry_runs import check, foreseen, happened, made_titles
from fake_stages import use_fake_stages

from pipeline.config.compose import Plan, plan


@pytest.fixture(autouse=True)
def _fake_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_stages(monkeypatch)


def planned(work: Path, *arguments: str) -> Plan:
    brief = ["tracking=none", "calibration.samples=4", "workloads.rounds=[0.5,1.0]", "stage=evaluate"]
    return plan([f"workdir={work}", *brief, *arguments], multirun=True)


def test_a_sweep_from_an_empty_store(tmp_path: Path) -> None:
    jobs = planned(tmp_path / "work", "kv=fp8,int8,int4_tensor")
    foretold = foreseen(jobs)
    assert not (tmp_path / "work").exists()
    made = happened(jobs)
    check(foretold, made)
    shared = ["calibration", "quantize fp16", "export", "build fp16", "build fp16 as torch", "baseline fp16 1/2"]
    assert made_titles(made)[0][:6] == shared
    assert "round int8 2/2" in made_titles(made)[1]
    assert [one.title for one in foretold[0] if not one.certain] == ["baseline fp16 2/2", "round fp8 2/2"]
    assert not {*shared} & {*made_titles(made)[1], *made_titles(made)[2]}


def test_a_second_sweep_reuses_everything_and_one_with_another_policy_all_but_its_own(tmp_path: Path) -> None:
    work = tmp_path / "work"
    happened(planned(work, "kv=fp8,int8"))
    again = planned(work, "kv=fp8,int8")
    foretold = foreseen(again)
    assert all(one.reused and one.certain for job in foretold for one in job)
    check(foretold, happened(again))

    more = planned(work, "kv=int8,int4")
    foretold = foreseen(more)
    made = happened(more)
    check(foretold, made)
    own = ["quantize int4", "build int4", "build int4 as torch", "round int4 1/2", "evaluate int4", "identity int4"]
    assert made_titles(made) == [[], own]
    assert [one.title for one in foretold[1] if one.certain and not one.reused] == own


def test_what_a_key_changes_is_made_anew_and_no_more(tmp_path: Path) -> None:
    work = tmp_path / "work"
    happened(planned(work, "kv=fp8,int4"))
    other_texts = planned(work, "kv=fp8,int4", "calibration.samples=5")
    foretold = foreseen(other_texts)
    check(foretold, happened(other_texts))
    # More texts: int4 has no scale that they decide, and is judged by what was measured. fp8 may come out the same, and does.
    shared = ["export", "build fp16", "build fp16 as torch", "baseline fp16 1/2"]
    own = ["build int4", "build int4 as torch", "round int4 1/2", "evaluate int4"]
    assert [one.title for one in foretold[0] if one.reused and one.certain] == shared
    assert {*own} <= {one.title for one in foretold[1] if one.reused and one.certain}
    assert {"build fp8", "round fp8 1/2", "evaluate fp8"} <= {one.title for one in foretold[0] if not one.certain}

    other_gates = planned(work, "kv=fp8,int4", "gates.margin=0.2")
    foretold = foreseen(other_gates)
    made = happened(other_gates)
    check(foretold, made)
    assert made_titles(made) == [["identity fp8"], ["identity int4"]]


def test_other_weights_share_nothing_but_the_texts(tmp_path: Path) -> None:
    happened(planned(tmp_path / "work", "kv=fp8"))
    jobs = planned(tmp_path / "work", "kv=fp8", "weights=fp8", "stage=quantize")
    foretold = foreseen(jobs)
    check(foretold, happened(jobs))
    assert [one.title for one in foretold[0] if one.reused] == ["calibration"]


def test_what_is_damaged_or_gone_is_made_again(tmp_path: Path) -> None:
    work, jobs = tmp_path / "work", planned(tmp_path / "work", "kv=int8")
    happened(jobs)
    damaged = min((work / "artifacts" / "round").glob("[!.]*/answers.jsonl"))
    damaged.write_text("other")
    shutil.rmtree(next((work / "artifacts" / "calibration").glob("[!.]*")))
    foretold = foreseen(jobs)
    check(foretold, happened(jobs))
    assert not next(one for one in foretold[0] if one.title == "calibration").reused
