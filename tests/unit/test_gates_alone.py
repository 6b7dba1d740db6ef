"""Each gate is the only one that stops some fault: switched off, it would let that fault through.

A verdict passes where no line stops it, so a fault that one gate alone stops passes without that gate.
"""

from collections.abc import Callable
from typing import Any

import pytest
from gate_reports import answered, every_class, fidelity, gates, row, verdict
from test_conformance_gate import SOUND, engine, record, request
from test_coverage import a_probe, probes

from pipeline.verdict.report import Canary, Compaction, NoiseFloor, SampleRow
from pipeline.verdict.thresholds import Verdict


def changed(**values: Any) -> list[SampleRow]:
    """The rows of four workloads, those of one of them with other values."""
    return [r for r in every_class() if r.workload != "copy"] + answered("copy", 128, **values)


def every(count: int, **values: object) -> list[SampleRow]:
    """The rows, every count-th with other values."""
    return [r.model_copy(update=values) if i % count == 0 else r for i, r in enumerate(every_class())]


def of_rows(rows: list[SampleRow]) -> Callable[[], Verdict]:
    return lambda: verdict(rows)


def of_report(**changes: Any) -> Callable[[], Verdict]:
    return lambda: verdict(every_class(), **changes)


ALLOCATED = a_probe().allocation.model_copy(update={"pool_bytes": 256})

FAULTS: dict[str, tuple[str, Callable[[], Verdict]]] = {
    "answers that are lost while every distribution stays close": ("accuracy", of_rows(every_class(retrieval=40))),
    "more noise in one workload": ("max_mean_kl", of_rows(changed(mean_kl=0.15))),
    "likely tokens that change places": ("min_top10_overlap", of_rows(changed(top10_overlap=0.5))),
    "a text that the candidate finds less likely": ("max_ppl_ratio", of_rows(changed(candidate_nll=0.5))),
    "probabilities that move both ways": ("max_rms_delta_p", of_rows(changed(mean_squared_delta_p=0.2))),
    "one request in twenty with another's page": ("max_ruined_share", of_rows(every(20, mean_kl=0.7))),
    "single tokens that are far off": ("max_p999_kl", of_rows(every(4, kl_tail=[9.0] * 10))),
    "an error that grows with the context": (
        "max_kl_slope",
        of_rows([r.model_copy(update={"mean_kl": 1e-4 * r.context_tokens}) for r in every_class()]),
    ),
    "a number that is not finite": ("complete", of_rows(every(512, max_kl=None))),
    "an evaluation that does not read the cache": (
        "canary",
        of_report(canary=Canary(factor=0.1, rows=answered("retrieval", 8))),
    ),
    "a code that one request of seven stores wrong": (
        "conformance",
        of_report(conformance=record(engine(*SOUND.requests, request(stored=3e-3)))),
    ),
    "a fork that shares a page it should have copied": (
        "probe",
        of_report(probes=probes(candidate=a_probe(failures=["fork: fork at 65 tokens: KL 1"]))),
    ),
    "sixteen bits a number where four are claimed": (
        "allocation",
        of_report(probes=probes(candidate=a_probe(allocation=ALLOCATED))),
    ),
    "free generation with another scale": ("free_answers", of_report(probes=probes(free=["sample a: ..."]))),
    "noise of the engine itself": (
        "max_mean_kl",
        of_report(noise=NoiseFloor(samples=4, fidelity=fidelity(kl_mean=0.06), answer_flips=0)),
    ),
    "a baseline that was stored too coarsely": (
        "compaction",
        of_report(compaction=Compaction(tokens=100, kl_full=0.02, kl_head=0.02, difference=6e-4)),
    ),
    "fewer documents than anyone should trust": (
        "min_samples",
        lambda: verdict(
            [row("prose", i, judged=False, baseline_correct=None, candidate_correct=None) for i in range(31)],
            gates(max_ruined_share=0.2, max_p999_kl=100.0),
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_gate_alone_stops_its_fault(fault: str) -> None:
    gate, judge = FAULTS[fault]
    assert {check.gate for check in judge().checks if check.status in ("FAIL", "INCONCLUSIVE")} == {gate}


def test_nothing_stops_what_has_no_fault() -> None:
    assert verdict(every_class()).status == "PASS"
