"""The setup that judges faults: the real chain on the tiny model, with a fault in every engine that the chain loads.

Results of sound engines are created once and shared (checkpoints, bundles, the baseline's answers). Results of a faulty
engine go into a temporary folder that is deleted after the verdict, because the store's keys do not include the fault.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from faults.fault import MODELS, POLICIES, SETUPS, EngineName, Fault
from pipeline.chain.engine_steps import EngineSteps
from pipeline.chain.verdict_steps import EnginePair, VerdictSteps
from pipeline.cli import console
from pipeline.config.compose import plan
from pipeline.config.config import Config
from pipeline.store.store import Store
from stages.engines.interface import Engine
from stages.policies.policy import FP16_POLICY, POLICY_FILE, KVPolicy
from stages.verdict.gates import conclude, decide
from stages.verdict.report import EvaluationReport, SampleRow, load_report, load_rows
from stages.verdict.thresholds import Thresholds, Verdict

BACKENDS: dict[EngineName, tuple[str, ...]] = {
    "native": ("backend=onnxruntime", "backend.attention=native", "backend.threads=1"),
    "graph": ("backend=onnxruntime", "backend.attention=graph", "backend.threads=1"),
    "torch": ("backend=torch", "backend.device=cpu", "backend.threads=1"),
}

SMALL = (
    "workloads.samples={prose: 4, retrieval: 50, tool_call: 0, copy: 50, multi_turn: 0}",
    "workloads.rounds=[0.1, 1.0]",
    "workloads.max_scored_tokens=64",
    "workloads.noise_samples=1",
    "workloads.load={batch: 2, context_tokens: 128, new_tokens: 4}",
)
"""A small evaluation that sound caches pass. With 68 answers, `gates.min_recovery` left a sound int8 INCONCLUSIVE."""

DEFAULT = ("workloads.noise_samples=1", SMALL[-1])
"""The default evaluation: all 664 samples in the default rounds, but timed with a smaller load."""

SMALL_STRESS_TEST = (
    "workloads.stress_test={max_tokens: 640, decode_steps: 40, offset_steps: 4, max_batch: 20, requests: 60, seed: 0}"
)
"""A stress test that finds most faults. Faults that pass it are judged with the default stress test."""

SOUND = ("calibration", "weights", "extremes", "quantize", "export", "build", "encode")
"""Stages whose results do not depend on a fault."""


@dataclass(frozen=True)
class Judgement:
    """The gates' verdict on one engine, and the evidence."""

    verdict: Verdict
    report: EvaluationReport
    rows: list[SampleRow]


class FaultySteps(VerdictSteps):
    """The steps to a verdict, with a fault in every engine that is loaded, and reference engines that all faults share."""

    fault: Fault | None
    references: dict[str, Any]
    """Policy name -> reference engine."""

    def __init__(self, chain: EngineSteps) -> None:
        super().__init__(chain)
        backend = chain.backend
        backend.load = partial(self.load_faulty, backend.load)  # type: ignore[method-assign]

    def load_faulty(self, load: Callable[[Path], Engine], bundle: Path) -> Engine:
        """Load an engine and plant the fault, unless the engine is a baseline that does not share the fault."""
        policy = KVPolicy.model_validate_json((bundle / POLICY_FILE).read_text(encoding="utf-8"))
        fault = self.fault
        if fault is None or (policy == FP16_POLICY and not fault.shared):
            return set_up(load(bundle))
        if fault.holds and policy != FP16_POLICY:
            bundle = self.chain.bundle(policy_of(fault.holds)).path
        with fault.loads():
            engine = load(bundle)
        engine.policy = policy
        set_up(engine)
        fault.plant.apply(engine)
        return engine

    def load(self, policy: KVPolicy) -> EnginePair:
        pair = super().load(policy)
        if policy.name not in self.references:
            self.references[policy.name] = remembering(pair.reference)
        vars(pair)["reference"] = self.references[policy.name]
        return pair


def set_up(engine: Any) -> Engine:
    """Apply the set-up of the engine's cache."""
    SETUPS.get(engine.policy.name, lambda _: None)(engine)
    return engine  # type: ignore[no-any-return]


def remembering(reference: Any) -> Any:
    """Cache a reference engine's results on its own sequences, so that each is computed once."""
    torch_engine, answers = reference.engine, dict[Any, Any]()
    forced, replay = torch_engine.forced, torch_engine.replay

    def known(key: Any, compute: Callable[[], Any]) -> Any:
        key = (*key, torch_engine.prefill_chunk, torch_engine.reads_itself)
        if key not in answers:
            answers[key] = compute()
        return answers[key]

    def in_one_pass(tokens: Sequence[int], first: int) -> Any:
        return known((tuple(tokens), first), lambda: forced(tokens, first))

    def over_own_cache(
        sequences: Sequence[Any], caches: Sequence[Any] = (), *, rounding: float = 0.0, origins: Sequence[Any] = ()
    ) -> Any:
        if any(caches):
            return replay(sequences, caches, rounding=rounding, origins=origins)
        fed = tuple((tuple(sequence.tokens), tuple(sequence.pieces)) for sequence in sequences)
        return known((fed, rounding, tuple(origins)), lambda: replay(sequences, rounding=rounding, origins=origins))

    torch_engine.forced, torch_engine.replay = in_one_pass, over_own_cache
    return reference


class FaultRunner:
    """Judges faults in one work directory."""

    def __init__(self, work: Path, overrides: Sequence[str] = (), workloads: Sequence[str] = SMALL) -> None:
        self.work, self.workloads, self.overrides = work, workloads, overrides
        self._references: dict[tuple[str, str, int], dict[str, Any]] = {}

    def config(
        self, policy: str, engine: EngineName, *, stress_test: str = "small", workloads: Sequence[str] = (), seed: int = 0
    ) -> Config:
        """Return the configuration of one cache on one engine: the defaults with the overrides of this setup."""
        small = [SMALL_STRESS_TEST] if stress_test == "small" else ["workloads.stress_test.seed=0"]
        own = [*POLICIES[policy], *self._model(policy), *BACKENDS[engine], *small, *(workloads or self.workloads)]
        return plan([*own, *self.overrides, f"seed={seed}", "tracking=none"], multirun=False).jobs[0]

    def _model(self, policy: str) -> list[str]:
        """Return the override that selects the cache's model (written once), or nothing for the tiny model."""
        if policy not in MODELS:
            return []
        path = self.work.resolve() / "models" / policy
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            MODELS[policy](unfinished)
            unfinished.rename(path)
        return [f"model.path={path}"]

    def judge(self, policy: str, engine: EngineName = "native", fault: Fault | None = None, **options: Any) -> Judgement:
        """Judge an engine with or without a fault; `options` as in `config`."""
        config = self.config(policy, engine, **options)
        steps = self._steps(config, fault)
        with _silence():
            evaluation = steps.report()
        report, rows = load_report(evaluation.path), load_rows(evaluation.path)
        shutil.rmtree(self.work / "faulty")
        return Judgement(decide(report, rows, config.gates), report, rows)

    def _steps(self, config: Config, fault: Fault | None) -> FaultySteps:
        own = self.work / "faulty"
        shutil.rmtree(own, ignore_errors=True)
        shared = SOUND if fault is not None and fault.shared else (*SOUND, "baseline", "baseline_once")
        for stage in shared:
            (self.work / "sound" / stage).mkdir(parents=True, exist_ok=True)
            (own / stage).parent.mkdir(parents=True, exist_ok=True)
            (own / stage).symlink_to((self.work / "sound" / stage).resolve())
        steps = FaultySteps(EngineSteps(config, Store(own)))
        steps.fault = fault
        steps.references = self._references.setdefault((str(config.model.path), config.backend.name, config.seed), {})
        return steps


def decide_without(without: str, report: EvaluationReport, rows: Sequence[SampleRow], gates: Thresholds) -> Verdict:
    """Decide like the gates, but ignore the lines of one gate."""
    verdict = decide(report, rows, gates)
    checks = [check for check in verdict.checks if check.gate != without]
    return verdict if len(checks) == len(verdict.checks) else conclude(checks, verdict.samples_needed, verdict.round)


def failed_gates(judgement: Judgement) -> dict[str, str]:
    """Return the gates that failed an engine -> reason of the gate's first failed check."""
    gates: dict[str, str] = {}
    for check in judgement.verdict.checks:
        if check.status == "FAIL":
            gates.setdefault(check.gate, check.reason)
    return gates


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the evaluation's output; every fault prints one line."""
    with patch.object(console.out, "quiet", True), patch.object(console.err, "quiet", True):
        yield


def policy_of(name: str) -> KVPolicy:
    return plan([*POLICIES[name], "tracking=none"], multirun=False).jobs[0].kv
