"""The estimated work and time of a verdict, against measured runs."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from pipeline.chain.dry import preview
from pipeline.config.compose import plan
from stages.checkpoints.intake.shapes import ModelShape, read_model
from stages.checkpoints.places import locate_checkpoint
from stages.core.records import Sample
from stages.evaluate.inputs.rounds import assign_rounds
from stages.evaluate.inputs.samples import load_samples
from stages.planning.duration import VerdictWork, prefill, questions, verdict_work

ROOT = Path(__file__).resolve().parents[3]
OWN_QUESTIONS_S = 250
"""Wall seconds of the command with own questions in examples/README.md, on idle cores."""
LONG = json.loads((ROOT / "benchmarks" / "results" / "long_smollm2.json").read_text(encoding="utf-8"))


@cache
def planned(*arguments: str) -> tuple[VerdictWork, ModelShape]:
    job = plan(["model=smollm2", "kv=int8", *arguments], multirun=False).jobs[0]
    rounds = assign_rounds(load_samples(job.workloads), job.workloads.rounds)
    return verdict_work(rounds, job.workloads), read_model(locate_checkpoint(job.model.path))


def seconds(work: VerdictWork, model: ModelShape, threads: int = 1) -> tuple[float, float]:
    assert model.parameters is not None
    return work.seconds(model.parameters, model.kv.layers * model.q_heads * model.kv.head_dim, threads)


def test_a_verdict_takes_the_estimated_time_within_a_half() -> None:
    """The measured commands began with an empty work directory and ran on two threads of a machine with little else to do."""
    long, model = planned("workloads.lengths=[1024,4096,8192]")
    tickets, _ = planned("workloads=jsonl", f"workloads.jsonl={ROOT / 'examples' / 'support_tickets.jsonl'}")
    estimates = [*seconds(long, model, threads=2), seconds(tickets, model, threads=2)[1]]
    for estimated, measured in zip(estimates, [*reversed(LONG["wall_seconds"].values()), OWN_QUESTIONS_S], strict=True):
        assert 1 / 1.5 < estimated / measured < 1.5


def test_a_verdict_takes_the_estimated_memory() -> None:
    long, model = planned("workloads.lengths=[1024,4096,8192]")
    short, _ = planned("experiment=quick")
    assert model.parameters is not None
    measured = LONG["peak_memory_gib"]
    assert measured <= long.gib(model.parameters, model.kv) < 1.1 * measured
    assert short.gib(model.parameters, model.kv) < 0.9 * measured, "the caches of short questions are small"


def test_documents_rounds_and_threads_change_the_estimate() -> None:
    (chat, model), (long, _) = planned(), planned("workloads.lengths=[1024,4096,8192]")
    assert seconds(long, model)[0] > 3 * seconds(chat, model)[0]
    assert seconds(chat, model)[1] > 2 * seconds(chat, model)[0]
    assert seconds(chat, model, threads=2)[1] < 0.8 * seconds(chat, model)[1]
    look, _ = planned("experiment=quick")
    assert look.reference.tolist() == [0, 0, 0, 0]
    assert look.first.tolist() == look.whole.tolist()
    assert (prefill(100) + prefill(164, 100)).tolist() == prefill(164).tolist(), "a shared prefix is computed once"
    empty = Sample(id="a", workload="custom", reference="4", messages=(("user", ""),))
    assert questions([empty])[0].shared == 0


def test_a_dry_run_says_the_work_and_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert preview(plan(["model=smollm2", "kv=int8", "workloads.lengths=[1024,8192]", "dry=true"], multirun=False)) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(r"about [\d,]{6,} and [\d,]+ if the first round decides, [\d,]{6,} and [\d,]+ in all rounds", output)
    assert re.search(r"takes about 3\.6 GiB of memory and, if nothing is reused, \d+ min \d\d s if the first round", output)
