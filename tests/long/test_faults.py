"""Injected faults judged by whole evaluations on few requests, and the stress test on sound caches.

`python -m benchmarks.stress_table` runs the stress test with all policies, engines and seeds.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from faults.hooks import SOUND, Plant
from faults.library import BY_NAME
from helpers.engines.conformance import POLICIES, Conformity
from helpers.engines.random_llama import static_scales

from pipeline.chain.engine_steps import EngineSteps
from pipeline.chain.verdict_steps import VerdictSteps
from pipeline.cli import console
from pipeline.config.compose import plan
from pipeline.store.store import Store
from stages.core.records import no_progress
from stages.engines.interface import Engine
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.conformance.stress_test import run_stress_test
from stages.policies.policy import FP16_POLICY, POLICY_FILE, Eviction, KVPolicy
from stages.verdict.gates import conclude, decide
from stages.verdict.report import EvaluationReport, SampleRow, StressResult, load_report, load_rows
from stages.verdict.verdict import Verdict
from stages.workloads.config import StressTestConfig

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


class FaultRunner:
    """Judges faults by the real chain on the tiny model, in one work directory.

    Results of sound engines are created once and shared. Results of a faulty engine go into a temporary folder that is deleted
    after the verdict, because the store's keys do not include the fault.
    """

    def __init__(self, work: Path, workloads: Sequence[str]) -> None:
        self.work, self.config = work, plan([*CACHE, *workloads], multirun=False).jobs[0]

    def judge(self, plant: Plant = SOUND) -> Judgement:
        """Judge an engine with or without a fault, which every quantized engine has that the chain loads."""
        own = self.work / "faulty"
        for stage in SHARED:
            (self.work / "sound" / stage).mkdir(parents=True, exist_ok=True)
            (own / stage).parent.mkdir(parents=True, exist_ok=True)
            (own / stage).symlink_to((self.work / "sound" / stage).resolve())
        chain = EngineSteps(self.config, Store(own))
        load = chain.backend.load

        def load_faulty(bundle: Path) -> Engine:
            engine = load(bundle)
            if KVPolicy.model_validate_json((bundle / POLICY_FILE).read_text(encoding="utf-8")) != FP16_POLICY:
                plant(engine)
            return engine

        with (
            patch.object(chain.backend, "load", load_faulty),
            patch.object(console.out, "quiet", True),
            patch.object(console.err, "quiet", True),
        ):
            evaluation = VerdictSteps(chain).report()
        report, rows = load_report(evaluation.path), load_rows(evaluation.path)
        shutil.rmtree(own)
        return Judgement(decide(report, rows, self.config.gates), report, rows)

    def without(self, gate: str, judgement: Judgement) -> Verdict:
        """Decide like the gates, but ignore the lines of one gate."""
        verdict = decide(judgement.report, judgement.rows, self.config.gates)
        checks = [check for check in verdict.checks if check.gate != gate]
        return verdict if len(checks) == len(verdict.checks) else conclude(checks, verdict.samples_needed, verdict.round)


FEW = (
    "workloads.samples={prose: 2, retrieval: 3, tool_call: 0, copy: 3, multi_turn: 0}",
    "workloads.rounds=[1.0]",
    "workloads.noise_samples=1",
    "workloads.max_scored_tokens=32",
    "workloads.stress_test={max_tokens: 128, decode_steps: 8, offset_steps: 1, max_batch: 17, requests: 1, seed: 0}",
    "workloads.load={batch: 2, context_tokens: 128, new_tokens: 4}",
)
"""Workloads that are too small for a PASS, but large enough to detect faults that affect every request."""

EXPECTED_GATES = {"key_scale_head_x1_25": "conformance", "generate_other_callers": "free_answers"}
"""Fault -> gate that must detect it; judged in addition to ALONE."""

ALONE = {"must_fail_control": "control_without_effect", "stress_test": "rows_above_16", "allocation": "pool_twice_as_large"}
"""Gate -> a fault that passes if this gate is disabled."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> FaultRunner:
    return FaultRunner(tmp_path_factory.mktemp("faults"), FEW)


def test_no_gate_refuses_a_sound_engine(runner: FaultRunner) -> None:
    assert runner.judge().failed == set()


@pytest.mark.parametrize(("name", "gate"), EXPECTED_GATES.items())
def test_a_planted_fault_is_refused_by_its_gate(name: str, gate: str, runner: FaultRunner) -> None:
    assert gate in runner.judge(BY_NAME[name].plant).failed


@pytest.mark.parametrize(("gate", "name"), ALONE.items())
def test_a_fault_passes_without_the_only_gate_that_detects_it(gate: str, name: str, runner: FaultRunner) -> None:
    judgement = runner.judge(BY_NAME[name].plant)
    assert judgement.verdict.status == "FAIL"
    assert runner.without(gate, judgement).status != "FAIL"


CONFIG = StressTestConfig(max_tokens=448, decode_steps=24, offset_steps=4, max_batch=10, requests=16, seed=0)


def stressed(bench: Conformity, policy: KVPolicy, kind: str) -> StressResult:
    """Run the stress test on the tiny model: with native or graph attention, or on the reference engine itself."""
    plain = bench.engine(FP16_POLICY)
    engine: Any = TorchEngine.from_model(bench.model, policy, static_scales(policy, plain.shape))
    if kind != "reference":
        engine = bench.engine(policy, kind)
    return run_stress_test(engine, bench.reference(policy, plain), CONFIG, 8, 400, no_progress)


@pytest.mark.parametrize(
    ("name", "kind"), list(zip(sorted(POLICIES)[::4], cycle(["native", "graph", "reference"]), strict=False))
)
def test_a_sound_cache_passes_the_stress_test(name: str, kind: str, bench: Conformity) -> None:
    assert stressed(bench, POLICIES[name], kind).failures == []


def test_heavy_hitters_pass_though_their_cache_is_not_shown(bench: Conformity) -> None:
    eviction = Eviction(window_tokens=64, heavy_tokens=64)
    policy = POLICIES["int4_asym"].model_copy(update={"name": "int4_asym_h2o", "eviction": eviction})
    assert stressed(bench, policy, "reference").failures == []
