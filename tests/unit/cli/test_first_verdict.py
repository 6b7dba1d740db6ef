"""The first commands of a new user: too few questions are named before any work, and a quick check exits with 0."""

from pathlib import Path

import pytest
from helpers.commands.fake_stages import use_fake_stages

from pipeline.chain.dry import preview
from pipeline.chain.runner import run
from pipeline.cli import console
from pipeline.config.compose import Plan, plan
from pipeline.registry.summary import new_sweep
from stages.core.errors import Refusal, exit_code
from stages.core.records import Sample
from stages.verdict.gates.evaluation import too_few
from stages.verdict.thresholds import Thresholds

BRIEF = ["calibration.samples=4", "workloads.rounds=[1.0]", "tracking=none", "stage=evaluate"]


def questions(count: int, documents: int, workload: str = "own") -> list[Sample]:
    return [
        Sample(id=f"{workload}-{i}", workload=workload, reference="b", prompt="a", document=f"{workload}-{i % documents}")
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("samples", "gates", "message"),
    [
        (questions(20, 20), {}, "20 questions, 60 are needed"),
        (questions(60, 60), {}, None),
        (questions(300, 10), {}, "10 documents of own, 15 are needed (60 recommended)"),
        (questions(60, 60) + questions(9, 9, "rare"), {}, "9 documents of rare, 15 are needed (60 recommended)"),
        (questions(300, 100), {"min_samples": 200}, "100 documents of own, 200 are needed"),
        (questions(40, 40), {"max_ruined_share": 0.1}, None),
        (
            questions(40, 10),
            {"max_ruined_share": 0.1},
            "40 questions, 60 are needed (or 39 documents); 10 documents of own, 15 are needed (60 recommended)",
        ),
    ],
)
def test_too_few_questions_for_a_pass_are_known_before_any_work(
    samples: list[Sample], gates: dict[str, float], message: str | None
) -> None:
    expected = None if message is None else f"these questions cannot pass: {message}"
    assert too_few(samples, Thresholds.model_validate(gates)) == expected


def planned(work: Path, *arguments: str, sweeping: bool = False) -> Plan:
    return plan([f"workdir={work}", *BRIEF, *arguments], multirun=sweeping)


def run_command(jobs: Plan) -> int:
    """Run a command; return its exit code."""
    try:
        return run(jobs, new_sweep())
    except Refusal as error:
        return exit_code(error)
    finally:
        console.end()


def test_a_dry_run_exits_3_if_few_questions_cannot_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fake_stages(monkeypatch)
    monkeypatch.setattr("helpers.commands.fake_stages.QUESTIONS", questions(8, 8, "copy"))
    assert preview(planned(tmp_path, "kv=int8", "dry=true")) == 3
    output = capsys.readouterr()
    assert "8 copy samples in at most 1 round" in output.out
    line = "these questions cannot pass: 8 questions, 60 are needed; 8 documents of copy, 15 are needed (60 recommended)"
    assert f"workloads: {line}" in output.err
    assert "cannot pass" not in output.out, "the line is printed once"
    assert preview(planned(tmp_path, "kv=int8", "dry=true", "workloads.conformance_samples=0")) == 0


def test_a_quick_check_asks_the_users_questions_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "1 + 1 = ", "reference": "2"}\n')
    workloads = plan(["experiment=quick", "workloads=jsonl", f"workloads.jsonl={file}"], multirun=False).jobs[0].workloads
    assert (workloads.user_path, workloads.conformance_samples, workloads.rounds) == (file, 0, [1.0])
    assert not any(workloads.samples.values())
    pages = plan(["experiment=quick"], multirun=False).jobs[0].workloads
    assert pages.samples == {"documentation": 0, "lookup": 15, "extraction": 15, "quotation": 15, "recall": 15}


@pytest.mark.parametrize("sweeping", [False, True])
def test_a_finished_quick_check_exits_0_and_never_passes(
    tmp_path: Path, sweeping: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fake_stages(monkeypatch)
    policies = "kv=int8,fp8_head" if sweeping else "kv=int8"
    assert run_command(planned(tmp_path / "quick", "experiment=quick", policies, sweeping=sweeping)) == 0
    output = capsys.readouterr()
    assert "QUICK CHECK int8" in output.out
    assert "never passes" in output.out
    assert "INCONCLUSIVE" not in output.out.partition("KV caches against")[0]
    assert preview(planned(tmp_path / "quick", "experiment=quick", policies, sweeping=sweeping)) == 0
    if sweeping:
        return
    assert run_command(planned(tmp_path / "own", policies, "workloads.conformance_samples=0")) == 0
    assert run_command(planned(tmp_path / "whole", policies, "gates.min_samples=1000")) == 3
    assert run_command(planned(tmp_path / "bad", "experiment=quick", "kv=int4_tensor")) == 3, "a quick check can fail a cache"
