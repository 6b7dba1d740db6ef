"""Candidates with their evidence for tests of report.html."""

import math
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from helpers.registry.candidates import judged_candidate
from helpers.verdicts.reports import GATES, fidelity, report, row
from pipeline.cli.tables import comparison
from stages.core.records import Sample
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.joining import slices
from stages.report.exhibit import Exhibit, Occasion
from stages.verdict.candidate import Candidate
from stages.verdict.gates import decide
from stages.verdict.report import SampleRow

EDGES = [0, 256]
STEPS = 8


def rows(lost: int, workloads: Sequence[str] = ("retrieval", "copy"), count: int = 40, **changes: object) -> list[SampleRow]:
    """Return rows of a policy that loses the first `lost` answers of every workload and gains the last one."""
    return [
        row(
            workload,
            index,
            index < count - 1,
            lost <= index,
            **{
                "context_tokens": 100 + 8 * index,
                "scored_tokens": STEPS,
                "reference": f"the key is {index}",
                "baseline_generation": f"the key is {index}",
                "candidate_generation": f"the lock is {index}",
                **changes,
            },
        )
        for workload in workloads
        for index in range(count)
    ]


def asked(rows: Sequence[SampleRow], prompt: str = "Which key opens the door?") -> list[Sample]:
    return [
        Sample(id=row.id, workload=row.workload, reference=row.reference or "", messages=(("user", f"{prompt} ({row.id})"),))
        for row in rows
    ]


def exhibit(
    folder: Path, name: str, rows: Sequence[SampleRow], *, kib: float = 1.0, kl: float = 0.001, prompt: str = "Which key?"
) -> Exhibit:
    """Return a candidate judged by the default gates."""
    parts = [StepStatistics(*np.full((5, STEPS), kl))] * len(rows)
    made_report = report(list(rows))
    tests = made_report.tests
    made_report = made_report.model_copy(
        update={
            "slices": slices(rows, parts, EDGES),
            "tests": tests.model_copy(update={"system": tests.system.model_copy(update={"kib_per_token": kib})}),
            "baseline_tests": tests.model_copy(
                update={
                    "system": tests.system.model_copy(update={"kib_per_token": 2.0}),
                    "noise": fidelity(kl_mean=1e-5, top10_overlap=1.0, ppl_ratio=1.0),
                }
            ),
            "planned_workloads": dict.fromkeys((row.workload for row in rows), True),
        }
    )
    candidate: Candidate = judged_candidate(folder, sha256(name.encode()).hexdigest()[:8], metrics=made_report.metrics)
    decided = Candidate.decided(decide(made_report, rows, GATES))
    return Exhibit(
        candidate.model_copy(update={"name": name, **decided}),
        report=made_report,
        rows=rows,
        samples=asked(rows, prompt),
        evidence=candidate.identity.path.parent,
    )


def exhibits(folder: Path) -> list[Exhibit]:
    """Return a sound cache, a slightly larger cache with twice the distance, and a small cache that loses many answers."""
    return [
        exhibit(folder, "fp8", rows(0), kib=1.0, kl=0.001),
        exhibit(folder, "int8", rows(1), kib=1.1, kl=0.002),
        exhibit(folder, "int4", rows(20, mean_kl=0.4), kib=0.5, kl=math.e),
    ]


def occasion(folder: Path, exhibits: Sequence[Exhibit] = (), **changes: object) -> Occasion:
    overview = comparison([exhibit.candidate for exhibit in exhibits]).texts()
    values: dict[str, object] = {"model": "tiny", "workdir": folder, "sweep": "20260101-000000", "version": "0", **changes}
    return Occasion(overview=overview, **values)  # type: ignore[arg-type]
