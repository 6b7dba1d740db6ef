"""dry=true: what it foresees is what a run then makes and reuses, and it writes nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.compose import Plan, plan
from pipeline.core.errors import GateRefusal
from pipeline.dry.chain import open_foreseen
from pipeline.dry.command import foretell
from pipeline.dry.store import NEW, UNKNOWN, ForeseenStore
from pipeline.run import chain as chain_module
from pipeline.run.chain import Chain
from pipeline.run.runner import run

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


@dataclass(frozen=True)
class Asked:
    """An artifact that a job asked for."""

    title: str
    key: str | None
    """None where it is not known before."""
    reused: bool
    certain: bool = True
    """Whether it is known that it is asked for, and whether it is there."""


Made = list[list[Asked]]
"""By job."""


def planned(work: Path, *arguments: str) -> Plan:
    return plan([f"workdir={work}", *BRIEF, *arguments], multirun=True)


def foreseen(jobs: Plan) -> Made:
    store, asked = ForeseenStore(jobs.jobs[0].work / "artifacts"), []
    for number, config in enumerate(jobs.jobs, start=1):
        store.job = number
        chain = open_foreseen(config, store)
        chain.foresee()
        asked.append([_asked(chain, stage.title, stage.artifact.key, number) for stage in chain.finished])
    return asked


def _asked(chain: Any, title: str, key: str, job: int) -> Asked:
    one = chain.store.outcomes[key]
    values = [*one.recipe.inputs.values(), *map(str, one.recipe.config.values())]
    known = not any(value.startswith((UNKNOWN, NEW)) for value in values) and one.recipe.stage != "identity"
    return Asked(title, key if known else None, one.reused or one.job < job, chain.is_certain(one.recipe) and not one.perhaps)


@pytest.fixture
def really(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan], Made]:
    """Runs the jobs, and returns what they made and reused."""
    asked: list[Asked] = []
    get = Chain._get

    def noted(self: Chain, recipe: Any, fill: Any, title: str, resumable: bool) -> Any:
        artifact = get(self, recipe, fill, title, resumable)
        asked.append(Asked(title, artifact.key, artifact.reused))
        return artifact

    monkeypatch.setattr(chain_module.Chain, "_get", noted)

    def go(jobs: Plan) -> Made:
        made = []
        for config in jobs.jobs:
            asked.clear()
            try:
                run(config, "sweep", jobs.sweeping, [])
            except GateRefusal:
                pytest.fail("jobs of a sweep are not refused")
            made.append(list(asked))
        return made

    return go


def check(foretold: Made, made: Made) -> None:
    """What was foreseen happened: the same artifacts in the same order, reused or made, under the keys that were known."""
    for before, after in zip(foretold, made, strict=True):
        happened = {one.title: one for one in after}
        asked = [one.title for one in before if one.title in happened]
        assert asked == [one.title for one in after], "an artifact was not foreseen, or comes in another order"
        assert [one.title for one in before if one.certain and one.title not in happened] == []
        for one in before:
            if one.title in happened and one.certain:
                assert one.reused == happened[one.title].reused, one.title
            if one.title in happened and one.key is not None:
                assert one.key == happened[one.title].key, one.title


def made_titles(made: Made) -> list[set[str]]:
    return [{one.title for one in job if not one.reused} for job in made]


def test_a_sweep_makes_and_reuses_what_was_foreseen_and_nothing_the_second_time(
    tmp_path: Path, really: Callable[[Plan], Made], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = planned(tmp_path / "work", "stage=evaluate", "kv=fp8,int4_tensor")
    foretold = foreseen(jobs)
    assert not (tmp_path / "work").exists()
    made = really(jobs)
    check(foretold, made)
    assert "round fp8 1/2" in made_titles(made)[0]
    assert {"build fp16", "export", "baseline fp16 1/2"} <= made_titles(made)[0] - made_titles(made)[1]

    again = foreseen(jobs)
    assert all(one.reused and one.certain for job in again for one in job)
    check(again, really(jobs))
    assert foretell(jobs) == 3  # so few samples show nothing
    said = capsys.readouterr()
    assert "int4_tensor is judged already: FAIL" in said.out
    assert "no candidate of the sweep passed" in said.err


def test_what_one_changed_key_makes_anew_is_foreseen(tmp_path: Path, really: Callable[[Plan], Made]) -> None:
    really(planned(tmp_path / "work", "stage=build", "kv=fp16,int4"))
    more = planned(tmp_path / "work", "stage=build", "kv=int8,fp8")
    foretold = foreseen(more)
    check(foretold, really(more))
    assert [one.title for one in foretold[0] if one.reused] == ["calibration", "export"]

    other_texts = planned(tmp_path / "work", "stage=build", "kv=fp16,int4,fp8", "calibration.samples=5")
    foretold = foreseen(other_texts)
    made = really(other_texts)
    check(foretold, made)
    # Scales of int4 come from the tokens themselves, those of fp8 from the texts, which may give the same.
    assert made_titles(made)[1] == {"quantize int4"}
    assert [one.title for one in foretold[2] if not one.certain] == ["quantize fp8", "build fp8"]
