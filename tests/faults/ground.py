"""The ground that faults are judged on: the real chain on the tiny model, with a fault in every engine that the chain loads.

What is sound is made once and shared (checkpoints, bundles, the baseline's answers); what a faulty engine gives is made in a
folder of its own, which goes when the verdict is known: the store's keys know nothing of a fault.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from faults.fault import MODELS, POLICIES, EngineName, Fault
from pipeline.artifacts.backend import Backend
from pipeline.artifacts.store import Artifact, Store
from pipeline.config.compose import plan
from pipeline.config.config import Config
from pipeline.core.engine import Engine
from pipeline.core.kv import FP16_POLICY, POLICY_FILE, KVPolicy
from pipeline.loading import open_backend
from pipeline.run import chain as chain_module
from pipeline.run.chain import Chain
from pipeline.terminal import console
from pipeline.verdict.gates import Gates, conclude, decide
from pipeline.verdict.report import EvaluationReport, SampleRow, load_report, load_rows
from pipeline.verdict.thresholds import Verdict

BACKENDS: dict[EngineName, tuple[str, ...]] = {
    "native": ("backend=onnxruntime", "backend.attention=native", "backend.threads=1"),
    "graph": ("backend=onnxruntime", "backend.attention=graph", "backend.threads=1"),
    "torch": ("backend=torch", "backend.device=cpu", "backend.threads=1"),
}

WORKLOADS = (
    "workloads.samples={prose: 8, retrieval: 72, tool_call: 0, copy: 72, multi_turn: 0}",
    "workloads.rounds=[0.06, 1.0]",
    "workloads.max_scored_tokens=64",
    "workloads.noise_samples=1",
    "workloads.canary_samples=1",
    "workloads.load={batch: 2, context_tokens: 128, new_tokens: 4, warmup_steps: 1, budget_gib: 1.0, sequence_tokens: 1024}",
)
"""Less of everything than the default, at which no sound engine of a cache that is fine enough fails."""

SMALL_PROBE = "workloads.probe={max_tokens: 1152, decode_steps: 208, offset_steps: 4, max_batch: 20, requests: 40}"

SOUND = ("calibration", "quantize", "export", "build", "encode")
"""Stages that no fault has a part in."""


@dataclass(frozen=True)
class Judgement:
    """What the gates said of one engine, and what they said it of."""

    verdict: Verdict
    report: EvaluationReport
    rows: list[SampleRow]


class FaultyBackend:
    """A backend that plants a fault in what it loads; everything else is the backend's own."""

    def __init__(self, backend: Backend, load: Callable[[Path], Engine]) -> None:
        self._backend = backend
        self.load = load

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class FaultyChain(Chain):
    """The chain of a configuration whose engines have a fault."""

    fault: Fault | None = None

    @cached_property
    def backend(self) -> Backend:
        backend = open_backend(self.config.backend)
        return FaultyBackend(backend, lambda bundle: self._load(backend, bundle))  # type: ignore[return-value]

    def _load(self, backend: Backend, bundle: Path) -> Engine:
        policy = KVPolicy.model_validate_json((bundle / POLICY_FILE).read_text(encoding="utf-8"))
        fault = self.fault
        if fault is None or (policy == FP16_POLICY and not fault.shared):
            return backend.load(bundle)
        if fault.holds and policy != FP16_POLICY:
            bundle = self.bundle(_policy(fault.holds)).path
        with fault.loads():
            engine = backend.load(bundle)
        engine.policy = policy
        fault.plant(engine)
        return engine


class Ground:
    """Judges faults in one work directory."""

    def __init__(self, work: Path, overrides: Sequence[str] = (), workloads: Sequence[str] = WORKLOADS) -> None:
        self.work, self.overrides = work, (*workloads, *overrides)

    def config(self, policy: str, engine: EngineName, *, rare: bool = False) -> Config:
        """Return the configuration of one cache on one engine: the defaults, but for the overrides of this ground."""
        probe = [] if rare else [SMALL_PROBE]
        overrides = [*POLICIES[policy], *self._model(policy), *BACKENDS[engine], *probe, *self.overrides]
        return plan([*overrides, "tracking=none"], multirun=False).jobs[0]

    def _model(self, policy: str) -> list[str]:
        """Return what names the model of a cache: nothing for the tiny model, otherwise a checkpoint that is written once."""
        if policy not in MODELS:
            return []
        path = self.work.resolve() / "models" / policy
        if not path.exists():
            partial = path.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            MODELS[policy](partial)
            partial.rename(path)
        return [f"model.path={path}"]

    def judge(self, fault: Fault, without: str = "") -> Judgement:
        """Judge an engine with a fault, `without` one of the gates."""
        with patch.object(chain_module, "decide", partial(decide_without, without)):
            return self._judge(self.config(fault.policy, fault.engine, rare=fault.rare), fault, without)

    def judge_sound(self, policy: str, engine: EngineName = "native") -> Judgement:
        """Judge an engine without one."""
        return self._judge(self.config(policy, engine), None)

    def _judge(self, config: Config, fault: Fault | None, without: str = "") -> Judgement:
        own = self.work / "faulty"
        shutil.rmtree(own, ignore_errors=True)
        shared = SOUND if fault is not None and fault.shared else (*SOUND, "baseline", "baseline_once")
        for stage in shared:
            (self.work / "sound" / stage).mkdir(parents=True, exist_ok=True)
            (own / stage).parent.mkdir(parents=True, exist_ok=True)
            (own / stage).symlink_to((self.work / "sound" / stage).resolve())
        chain = FaultyChain(config, Store(own))
        chain.fault = fault
        with _silence():
            evaluation: Artifact = chain.evaluation(config.kv)[0]
        report, rows = load_report(evaluation.path), load_rows(evaluation.path)
        shutil.rmtree(own)
        return Judgement(decide_without(without, report, rows, config.gates), report, rows)


def decide_without(without: str, report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates) -> Verdict:
    """Decide as the gates do, but for the lines of one of them."""
    verdict = decide(report, rows, gates)
    checks = [check for check in verdict.checks if check.gate != without]
    return verdict if len(checks) == len(verdict.checks) else conclude(checks, verdict.samples_needed, verdict.round)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep what an evaluation prints off the terminal: there is a line a fault."""
    with patch.object(console.out, "quiet", True), patch.object(console.err, "quiet", True):
        yield


def _policy(name: str) -> KVPolicy:
    return plan([*POLICIES[name], "tracking=none"], multirun=False).jobs[0].kv
