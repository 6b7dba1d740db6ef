"""The setup that judges faults: the real chain on the tiny model, with a fault in every quantized engine that the chain loads.

Results of sound engines are created once and shared (checkpoints, bundles, the baseline's answers). Results of a faulty
engine go into a temporary folder that is deleted after the verdict, because the store's keys do not include the fault.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

from faults.hooks import SOUND, Plant
from pipeline.chain.engine_steps import EngineSteps
from pipeline.chain.verdict_steps import VerdictSteps
from pipeline.cli import console
from pipeline.config.compose import plan
from pipeline.store.store import Store
from stages.engines.interface import Engine
from stages.policies.policy import FP16_POLICY, POLICY_FILE, KVPolicy
from stages.verdict.gates import conclude, decide
from stages.verdict.report import EvaluationReport, SampleRow, load_report, load_rows
from stages.verdict.verdict import Verdict

CACHE = ("kv=int8", "backend=onnxruntime", "backend.attention=native", "backend.threads=1", "tracking=none")

SHARED = ("calibration", "weights", "extremes", "quantize", "export", "build", "encode", "baseline", "baseline_once")
"""Stages whose results do not depend on a fault."""


@dataclass(frozen=True)
class Judgement:
    """The gates' verdict on one engine, and the evidence."""

    verdict: Verdict
    report: EvaluationReport
    rows: list[SampleRow]

    @property
    def failed(self) -> set[str]:
        """The gates that failed the engine."""
        return {check.gate for check in self.verdict.checks if check.status == "FAIL"}


class FaultySteps(VerdictSteps):
    """The steps to a verdict, with a fault in every quantized engine."""

    def __init__(self, chain: EngineSteps, plant: Plant) -> None:
        super().__init__(chain)
        self.plant = plant
        backend = chain.backend
        backend.load = partial(self.load_faulty, backend.load)  # type: ignore[method-assign]

    def load_faulty(self, load: Callable[[Path], Engine], bundle: Path) -> Engine:
        """Load an engine and plant the fault, unless the engine is the baseline."""
        engine = load(bundle)
        if KVPolicy.model_validate_json((bundle / POLICY_FILE).read_text(encoding="utf-8")) != FP16_POLICY:
            self.plant(engine)
        return engine


class FaultRunner:
    """Judges faults in one work directory."""

    def __init__(self, work: Path, workloads: Sequence[str]) -> None:
        self.work, self.config = work, plan([*CACHE, *workloads], multirun=False).jobs[0]

    def judge(self, plant: Plant = SOUND) -> Judgement:
        """Judge an engine with or without a fault."""
        own = self.work / "faulty"
        for stage in SHARED:
            (self.work / "sound" / stage).mkdir(parents=True, exist_ok=True)
            (own / stage).parent.mkdir(parents=True, exist_ok=True)
            (own / stage).symlink_to((self.work / "sound" / stage).resolve())
        steps = FaultySteps(EngineSteps(self.config, Store(own)), plant)
        with patch.object(console.out, "quiet", True), patch.object(console.err, "quiet", True):
            evaluation = steps.report()
        report, rows = load_report(evaluation.path), load_rows(evaluation.path)
        shutil.rmtree(own)
        return Judgement(decide(report, rows, self.config.gates), report, rows)

    def without(self, gate: str, judgement: Judgement) -> Verdict:
        """Decide like the gates, but ignore the lines of one gate."""
        verdict = decide(judgement.report, judgement.rows, self.config.gates)
        checks = [check for check in verdict.checks if check.gate != gate]
        return verdict if len(checks) == len(verdict.checks) else conclude(checks, verdict.samples_needed, verdict.round)
